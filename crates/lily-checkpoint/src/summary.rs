//! What a checkpoint is, in numbers: for `lily inspect`, for logs, and to know a model again.

use crate::checkpoint::{Checkpoint, MULTI_TOKEN, TEXT, TensorCount, UNKNOWN, VISION};
use crate::config::ModelConfig;
use crate::weights::WeightFormat;

/// A weight file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSummary {
    /// Its name in the checkpoint.
    pub name: String,
    /// Its length in bytes.
    pub bytes: u64,
    /// Bytes of its header; the data starts behind them, at any alignment.
    pub header_bytes: u64,
    /// Tensors in it, skipped ones included.
    pub tensors: usize,
}

/// The text model's weights of one format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormatSummary {
    /// The format.
    pub format: WeightFormat,
    /// Weights of the model in it (a quantised one is three tensors).
    pub weights: usize,
    /// Numbers that they hold.
    pub parameters: u64,
    /// Bytes that they take, scales and biases included.
    pub bytes: u64,
}

/// What [`Checkpoint::summary`] tells.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// The weight files in order of their names.
    pub files: Vec<FileSummary>,
    /// Tensors of the text model.
    pub text: TensorCount,
    /// Tensors of the vision tower: skipped.
    pub vision: TensorCount,
    /// Tensors for multi-token prediction: skipped.
    pub multi_token: TensorCount,
    /// Tensors that nothing here knows: skipped.
    pub unknown: TensorCount,
    /// The text model's weights by format, those with the most bytes first.
    pub formats: Vec<FormatSummary>,
    /// Numbers in the text model's weights.
    pub parameters: u64,
    /// See [`Checkpoint::identity`].
    pub identity: String,
    /// The model's shape.
    pub config: ModelConfig,
}

impl Checkpoint {
    /// Counts files, tensors and bytes.
    pub fn summary(&self) -> Summary {
        let files = self
            .files
            .iter()
            .map(|file| FileSummary {
                name: file.name.clone(),
                bytes: file.content.len() as u64,
                header_bytes: file.header_bytes,
                tensors: file.tensors,
            })
            .collect();
        let mut formats: Vec<FormatSummary> = Vec::new();
        for weight in self.weights() {
            let at = formats
                .iter()
                .position(|known| known.format == weight.format);
            let at = at.unwrap_or_else(|| {
                let format = weight.format;
                formats.push(FormatSummary {
                    format,
                    weights: 0,
                    parameters: 0,
                    bytes: 0,
                });
                formats.len() - 1
            });
            formats[at].weights += 1;
            formats[at].parameters += weight.rows() as u64 * weight.columns() as u64;
            formats[at].bytes += weight.data.bytes() as u64;
        }
        // Stable: formats of equal size stay in the order in which the model first reads them.
        formats.sort_by_key(|format| std::cmp::Reverse(format.bytes));
        Summary {
            files,
            text: self.counts[TEXT],
            vision: self.counts[VISION],
            multi_token: self.counts[MULTI_TOKEN],
            unknown: self.counts[UNKNOWN],
            parameters: formats.iter().map(|format| format.parameters).sum(),
            formats,
            identity: self.identity(),
            config: self.config.clone(),
        }
    }

    /// A fingerprint of the checkpoint: 32 hexadecimal digits, the same wherever and whenever the same files
    /// are opened. It covers the configuration, the headers and the lengths of the weight files, and a few
    /// bytes of data at fixed places (headers of two trainings of one model can be equal), so it costs
    /// milliseconds. It tells models apart; it does not protect against forgery.
    pub fn identity(&self) -> String {
        /// Places sampled in each file, and the bytes read at each.
        const SAMPLES: usize = 16;
        const SAMPLE_BYTES: usize = 64;
        let mut hash = Fnv128::new();
        hash.part(self.config_text.as_bytes());
        for file in &self.files {
            let content: &[u8] = &file.content;
            hash.part(&(content.len() as u64).to_le_bytes());
            let (header, data) = content.split_at(file.header_bytes as usize);
            hash.part(header);
            for sample in 0..SAMPLES {
                // The end of each sixteenth: the last bytes of the file are among them.
                let end = (data.len() as u128 * (sample as u128 + 1) / SAMPLES as u128) as usize;
                hash.part(&data[end.saturating_sub(SAMPLE_BYTES)..end]);
            }
        }
        format!("{:032x}", hash.state)
    }
}

/// FNV-1a with 128 bits.
struct Fnv128 {
    state: u128,
}

impl Fnv128 {
    fn new() -> Self {
        Fnv128 {
            state: 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d,
        }
    }

    fn bytes(&mut self, bytes: &[u8]) {
        const PRIME: u128 = (1 << 88) + 0x13b;
        for byte in bytes {
            self.state = (self.state ^ u128::from(*byte)).wrapping_mul(PRIME);
        }
    }

    /// Adds a part with its length, so that what moves from one part to the next changes the result.
    fn part(&mut self, bytes: &[u8]) {
        self.bytes(&(bytes.len() as u64).to_le_bytes());
        self.bytes(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::Fnv128;

    #[test]
    fn the_hash_is_fnv_1a() {
        // The published test vectors of the empty text and of "foobar".
        let mut hash = Fnv128::new();
        assert_eq!(hash.state, 0x6c62272e07bb014262b821756295c58d);
        hash.bytes(b"foobar");
        assert_eq!(hash.state, 0x343e1662793c64bf6f0d3597ba446f18);
    }
}
