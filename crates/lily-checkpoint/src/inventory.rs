//! Which stored tensor is which weight, and whether all of them are what the configuration says.

use crate::declared::{AFFINE_BITS, AFFINE_GROUPS};
use crate::error::CheckpointError;
use crate::header::{HeaderTensor, StoredType};
use crate::weights::{DType, WeightFormat, WeightSpec};
use std::collections::HashMap;

/// What a tensor's name says it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NameKind {
    Text,
    Vision,
    MultiToken,
}

/// Tells the text model's tensors from those that are skipped.
pub(crate) fn kind_of(name: &str) -> NameKind {
    let inner = name.strip_prefix("language_model.").unwrap_or(name);
    if name.split('.').any(|part| part == "mtp") {
        NameKind::MultiToken
    } else if ["vision_tower.", "model.visual."]
        .iter()
        .any(|start| inner.starts_with(start))
    {
        NameKind::Vision
    } else {
        NameKind::Text
    }
}

/// Whether the tensor, or module, belongs to a part that is not loaded.
pub(crate) fn is_skipped(name: &str) -> bool {
    kind_of(name) != NameKind::Text
}

/// A tensor and the file it is in.
pub(crate) struct Located {
    /// Index of the file.
    pub file: usize,
    pub tensor: HeaderTensor,
}

/// A part of a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub file: usize,
    pub start: usize,
    pub length: usize,
}

/// Where a weight lies.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Spans {
    Plain(Span),
    Affine {
        codes: Span,
        scales: Span,
        biases: Span,
    },
}

/// A weight, verified.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placement {
    pub spec: WeightSpec,
    pub format: WeightFormat,
    pub spans: Spans,
}

/// The text model's tensors by name, without the `language_model.` prefix.
pub(crate) struct Inventory<'a> {
    tensors: HashMap<String, Located>,
    /// The files' names, for errors.
    files: &'a [String],
    /// What the index says of tensors, by name as stored, and the index's own name.
    index: Option<(&'a HashMap<String, String>, String)>,
    /// The prefix that this checkpoint's tensors have, to name a missing one as its owner knows it.
    prefix: &'static str,
}

impl<'a> Inventory<'a> {
    /// An inventory of `tensors`, none of them skipped ones.
    pub fn new(
        tensors: Vec<Located>,
        files: &'a [String],
        index: Option<(&'a HashMap<String, String>, String)>,
    ) -> Result<Inventory<'a>, CheckpointError> {
        const PREFIX: &str = "language_model.";
        let prefixed = tensors
            .iter()
            .any(|located| located.tensor.name.starts_with(PREFIX));
        let mut by_name: HashMap<String, Located> = HashMap::with_capacity(tensors.len());
        for located in tensors {
            check_layout(&located, files)?;
            let name = &located.tensor.name;
            let name = name.strip_prefix(PREFIX).unwrap_or(name).to_string();
            if let Some(other) = by_name.get(&name) {
                return Err(CheckpointError::DuplicateTensor {
                    file: files[located.file].clone(),
                    tensor: located.tensor.name,
                    other: format!("{} ({})", files[other.file], other.tensor.name),
                });
            }
            by_name.insert(name, located);
        }
        let prefix = if prefixed { PREFIX } else { "" };
        Ok(Inventory {
            tensors: by_name,
            files,
            index,
            prefix,
        })
    }

    /// Finds the tensors of a weight and verifies them.
    pub fn place(&self, spec: &WeightSpec) -> Result<Placement, CheckpointError> {
        let path = spec.id.module_path();
        let part = |part: &str| format!("{path}.{part}");
        let main_name = if spec.id.role.is_bare() {
            path.clone()
        } else {
            part("weight")
        };
        if let Some(bias) = self.tensors.get(&part("bias")) {
            return Err(CheckpointError::UnexpectedTensor {
                file: self.files[bias.file].clone(),
                tensor: bias.tensor.name.clone(),
                expected: "no bias: the architecture has none".to_string(),
            });
        }
        let quantised = spec.shape.is_linear()
            && (self.tensors.contains_key(&part("scales"))
                || self.tensors.contains_key(&part("biases"))
                || self
                    .tensors
                    .get(&main_name)
                    .is_some_and(|main| main.tensor.stored == StoredType::U32));
        if quantised {
            self.place_affine(spec, &main_name, &part("scales"), &part("biases"))
        } else {
            self.place_plain(spec, &main_name)
        }
    }

    fn place_plain(&self, spec: &WeightSpec, name: &str) -> Result<Placement, CheckpointError> {
        let expected = spec.shape.stored();
        let located = self.find(name, || describe_shape(&expected))?;
        let dtype = self.float_type(located)?;
        self.check_shape(located, &expected)?;
        Ok(Placement {
            spec: *spec,
            format: WeightFormat::Plain(dtype),
            spans: Spans::Plain(span(located)),
        })
    }

    fn place_affine(
        &self,
        spec: &WeightSpec,
        main_name: &str,
        scales_name: &str,
        biases_name: &str,
    ) -> Result<Placement, CheckpointError> {
        let main = self.find(main_name, || "the codes of a quantised matrix".to_string())?;
        let scales = self.find(scales_name, || {
            "the scales of a quantised matrix".to_string()
        })?;
        if scales.tensor.stored == StoredType::U8 {
            return Err(self.float_mode(spec, main, scales));
        }
        let biases = self.find(biases_name, || {
            "the biases of a quantised matrix".to_string()
        })?;
        if main.tensor.stored != StoredType::U32 {
            return Err(self.wrong_type(main, "U32 (there are scales)"));
        }
        let dtype = self.float_type(scales)?;
        if biases.tensor.stored != scales.tensor.stored {
            return Err(self.wrong_type(
                biases,
                &format!("{} (that of the scales)", scales.tensor.stored),
            ));
        }

        // All but the last dimension are the matrix's own; the last ones imply width and group.
        let mut outer = spec.shape.stored();
        let columns = outer.pop().unwrap_or(0);
        let words = self.last_dimension(main, &outer, "words")?;
        let groups = self.last_dimension(scales, &outer, "groups")?;
        self.check_shape(biases, &scales.tensor.shape)?;
        let group = (groups > 0 && columns.is_multiple_of(groups)).then(|| columns / groups.max(1));
        let group = group
            .and_then(|group| {
                AFFINE_GROUPS
                    .into_iter()
                    .find(|known| usize::from(*known) == group)
            })
            .ok_or_else(|| CheckpointError::WrongWidth {
                file: self.files[scales.file].clone(),
                tensor: scales.tensor.name.clone(),
                expected: format!("groups of {AFFINE_GROUPS:?} of {columns} inputs"),
                found: format!("{groups} groups"),
            })?;
        // Asked this way round, nothing is rounded and nothing overflows.
        let bits = AFFINE_BITS
            .into_iter()
            .find(|bits| words.checked_mul(32) == Some(columns * usize::from(*bits)))
            .ok_or_else(|| CheckpointError::WrongWidth {
                file: self.files[main.file].clone(),
                tensor: main.tensor.name.clone(),
                expected: format!("codes of {AFFINE_BITS:?} bits for {columns} inputs"),
                found: format!("{words} words of 32 bits a row"),
            })?;
        Ok(Placement {
            spec: *spec,
            format: WeightFormat::Affine {
                bits,
                group,
                scales: dtype,
            },
            spans: Spans::Affine {
                codes: span(main),
                scales: span(scales),
                biases: span(biases),
            },
        })
    }

    /// Names the float quantisation that byte-sized scales mean.
    fn float_mode(&self, spec: &WeightSpec, main: &Located, scales: &Located) -> CheckpointError {
        let (_, columns) = spec.shape.rows_and_columns();
        let last = |located: &Located| located.tensor.shape.last().copied().unwrap_or(0) as u64;
        let bits = last(main).saturating_mul(32) / columns as u64;
        let group = columns as u64 / last(scales).max(1);
        let mode = match (bits, group) {
            (4, 32) => "mxfp4".to_string(),
            (4, 16) => "nvfp4".to_string(),
            (8, 32) => "mxfp8".to_string(),
            _ => format!("a float mode ({bits} bits, groups of {group})"),
        };
        CheckpointError::UnsupportedQuantization {
            file: self.files[scales.file].clone(),
            subject: scales.tensor.name.clone(),
            mode,
        }
    }

    /// The tensor, which must be there, and in the file where the index has it.
    fn find(&self, name: &str, expected: impl Fn() -> String) -> Result<&Located, CheckpointError> {
        let listed = |stored_name: &str| {
            let (map, _) = self.index.as_ref()?;
            map.get(stored_name)
        };
        let Some(located) = self.tensors.get(name) else {
            let tensor = format!("{}{name}", self.prefix);
            let file = match (&self.index, listed(&tensor)) {
                (_, Some(shard)) => self.file_named(shard),
                (Some((_, index)), None) => index.clone(),
                (None, None) => self.files.first().cloned().unwrap_or_default(),
            };
            return Err(CheckpointError::MissingTensor {
                file,
                tensor,
                expected: expected(),
            });
        };
        if let (Some((_, index)), Some(shard)) = (&self.index, listed(&located.tensor.name)) {
            let found = &self.files[located.file];
            if self.file_named(shard) != *found {
                return Err(CheckpointError::Index {
                    file: index.clone(),
                    tensor: located.tensor.name.clone(),
                    expected: format!("the tensor in {shard}"),
                    found: format!("it in {found}"),
                });
            }
        }
        Ok(located)
    }

    /// The shard's name as errors give it.
    fn file_named(&self, shard: &str) -> String {
        let matching = self.files.iter().find(|file| {
            std::path::Path::new(file)
                .file_name()
                .is_some_and(|name| name == shard)
        });
        matching.cloned().unwrap_or_else(|| shard.to_string())
    }

    /// The number format of a tensor that holds numbers.
    fn float_type(&self, located: &Located) -> Result<DType, CheckpointError> {
        match located.tensor.stored {
            StoredType::Bf16 => Ok(DType::Bf16),
            StoredType::F16 => Ok(DType::F16),
            StoredType::F32 => Ok(DType::F32),
            _ => Err(self.wrong_type(located, "BF16, F16 or F32")),
        }
    }

    fn wrong_type(&self, located: &Located, expected: &str) -> CheckpointError {
        CheckpointError::WrongType {
            file: self.files[located.file].clone(),
            tensor: located.tensor.name.clone(),
            expected: expected.to_string(),
            found: located.tensor.stored.to_string(),
        }
    }

    fn check_shape(&self, located: &Located, expected: &[usize]) -> Result<(), CheckpointError> {
        if located.tensor.shape == expected {
            return Ok(());
        }
        Err(self.wrong_shape(located, describe_shape(expected)))
    }

    fn wrong_shape(&self, located: &Located, expected: String) -> CheckpointError {
        CheckpointError::WrongShape {
            file: self.files[located.file].clone(),
            tensor: located.tensor.name.clone(),
            expected,
            found: describe_shape(&located.tensor.shape),
        }
    }

    /// The last dimension of a tensor whose others must be `outer`.
    fn last_dimension(
        &self,
        located: &Located,
        outer: &[usize],
        what: &str,
    ) -> Result<usize, CheckpointError> {
        match located.tensor.shape.split_last() {
            Some((last, rest)) if rest == outer => Ok(*last),
            _ => {
                let mut parts: Vec<String> = outer.iter().map(usize::to_string).collect();
                parts.push(what.to_string());
                Err(self.wrong_shape(located, format!("[{}]", parts.join(", "))))
            }
        }
    }
}

/// Refuses the original layout, whose norms and matrices mean something else under similar names.
fn check_layout(located: &Located, files: &[String]) -> Result<(), CheckpointError> {
    let HeaderTensor { name, shape, .. } = &located.tensor;
    let sign = if name.starts_with("model.language_model.") {
        "names start with model.language_model.".to_string()
    } else if name.contains(".mlp.experts.") {
        "experts are named mlp.experts".to_string()
    } else if name.ends_with(".conv1d.weight")
        && matches!(shape.as_slice(), [_, _, last] if *last != 1)
    {
        // The reliable sign, also after renaming: MLX stores [channels, taps, 1].
        format!("convolution taps of shape {}", describe_shape(shape))
    } else {
        return Ok(());
    };
    let (file, tensor) = (files[located.file].clone(), name.clone());
    Err(CheckpointError::RawLayout { file, tensor, sign })
}

fn describe_shape(shape: &[usize]) -> String {
    format!("{shape:?}")
}

fn span(located: &Located) -> Span {
    // The header was verified against the length of the file, which is in the address space.
    let HeaderTensor { start, length, .. } = located.tensor;
    Span {
        file: located.file,
        start: start as usize,
        length: length as usize,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_what_is_skipped() {
        for (name, kind) in [
            ("language_model.model.norm.weight", NameKind::Text),
            ("model.norm.weight", NameKind::Text),
            ("lm_head.weight", NameKind::Text),
            ("vision_tower.blocks.0.attn.qkv.bias", NameKind::Vision),
            ("model.visual.patch_embed.proj.weight", NameKind::Vision),
            ("language_model.mtp.fc.weight", NameKind::MultiToken),
            (
                "mtp.layers.0.mlp.experts.gate_up_proj",
                NameKind::MultiToken,
            ),
            ("model.language_model.norm.weight", NameKind::Text),
        ] {
            assert_eq!(kind_of(name), kind, "{name}");
        }
    }
}
