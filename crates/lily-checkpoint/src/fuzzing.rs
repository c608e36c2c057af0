//! What the fuzz targets run (`fuzz/`), in the crate so that tests run it over the corpus as well.
//! Each function takes any bytes and panics only if an invariant of the parsers is broken.

use crate::declared::DeclaredModel;
use crate::header::parse_header;

/// Reads `bytes` as a safetensors file, and once more as a header whose length field and file length are
/// made to fit: the first four bytes are the length of the data, the rest is the JSON.
pub fn safetensors_header(bytes: &[u8]) {
    check_header(bytes, bytes.len() as u64);
    if let Some((length, json)) = bytes.split_at_checked(4) {
        let data_length = u32::from_le_bytes([length[0], length[1], length[2], length[3]]);
        let mut head = (json.len() as u64).to_le_bytes().to_vec();
        head.extend_from_slice(json);
        check_header(&head, head.len() as u64 + u64::from(data_length));
    }
}

fn check_header(bytes: &[u8], file_length: u64) {
    const NAME: &str = "fuzzed.safetensors";
    match parse_header(bytes, file_length, NAME) {
        Ok(header) => {
            let mut end = header.bytes;
            for tensor in &header.tensors {
                assert_eq!(tensor.start, end, "tensors tile the data");
                let elements: u64 = tensor.shape.iter().map(|length| *length as u64).product();
                assert_eq!(
                    elements * tensor.stored.bits(),
                    tensor.length * 8,
                    "shape and length"
                );
                end += tensor.length;
            }
            assert_eq!(end, file_length, "tensors tile the data");
        }
        Err(error) => assert!(
            error.to_string().contains(NAME),
            "an error names its file: {error}"
        ),
    }
}

/// Reads `bytes` as a `config.json` and walks through all that follows from it.
pub fn model_config(bytes: &[u8]) {
    const NAME: &str = "fuzzed.json";
    let Ok(json) = std::str::from_utf8(bytes) else {
        return;
    };
    match DeclaredModel::parse(json, NAME) {
        Ok(model) => {
            let config = &model.config;
            assert!(config.rotary_dim.is_multiple_of(2) && config.rotary_dim <= config.head_dim);
            assert!(
                config
                    .attention_heads
                    .is_multiple_of(config.key_value_heads)
            );
            assert!(
                config
                    .linear_value_heads
                    .is_multiple_of(config.linear_key_heads)
            );
            assert!((1..=config.experts).contains(&config.experts_per_token));
            // Overflow anywhere in here panics: the fuzzer builds with overflow checks.
            let specs = config.weights();
            let bytes: u64 = specs.iter().map(|spec| model.weight_bytes(spec)).sum();
            assert!(bytes > 0 && specs.len() > config.layers);
        }
        Err(error) => assert!(
            error.to_string().contains(NAME),
            "an error names its file: {error}"
        ),
    }
}
