//! The head of a safetensors file: eight bytes of length, then JSON that says where each tensor lies.
//!
//! This is the part of a checkpoint that an attacker writes freely, so nothing is believed: lengths are
//! compared with the file, products are checked for overflow, and the tensors must tile the data
//! without gap or overlap, as the format demands and as MLX writes them. Entries come in any order (MLX
//! writes them in that of a hash table), and the header has any length, odd ones included.

use crate::error::{CheckpointError, printable};
use serde::de::{Deserializer, MapAccess, Visitor};
use std::collections::{BTreeMap, HashSet};
use std::fmt;

/// Longest header that is read: the format's own limit. The real model's four have 60 to 110 KB each.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Most dimensions of a tensor. The model's have at most three, a vision tower's five.
const MAX_RANK: usize = 16;

/// Element type of a stored tensor, as safetensors names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // The names are the format's own and say all there is to say.
pub enum StoredType {
    Bool,
    U8,
    I8,
    F4,
    F6E2M3,
    F6E3M2,
    F8E5M2,
    F8E4M3,
    F8E8M0,
    U16,
    I16,
    F16,
    Bf16,
    U32,
    I32,
    F32,
    U64,
    I64,
    F64,
    C64,
}

/// Each type with its name and the bits of an element.
const STORED_TYPES: [(StoredType, &str, u64); 20] = [
    (StoredType::Bool, "BOOL", 8),
    (StoredType::U8, "U8", 8),
    (StoredType::I8, "I8", 8),
    (StoredType::F4, "F4", 4),
    (StoredType::F6E2M3, "F6_E2M3", 6),
    (StoredType::F6E3M2, "F6_E3M2", 6),
    (StoredType::F8E5M2, "F8_E5M2", 8),
    (StoredType::F8E4M3, "F8_E4M3", 8),
    (StoredType::F8E8M0, "F8_E8M0", 8),
    (StoredType::U16, "U16", 16),
    (StoredType::I16, "I16", 16),
    (StoredType::F16, "F16", 16),
    (StoredType::Bf16, "BF16", 16),
    (StoredType::U32, "U32", 32),
    (StoredType::I32, "I32", 32),
    (StoredType::F32, "F32", 32),
    (StoredType::U64, "U64", 64),
    (StoredType::I64, "I64", 64),
    (StoredType::F64, "F64", 64),
    (StoredType::C64, "C64", 64),
];

impl StoredType {
    fn from_name(name: &str) -> Option<Self> {
        STORED_TYPES
            .iter()
            .find(|(_, known, _)| *known == name)
            .map(|(stored, _, _)| *stored)
    }

    /// The name and the bits of an element.
    fn facts(self) -> (&'static str, u64) {
        // Every variant is in the table (a test holds it to that), so the search never fails.
        let entry = STORED_TYPES.iter().find(|(stored, _, _)| *stored == self);
        entry.map_or(("?", 8), |(_, name, bits)| (*name, *bits))
    }

    /// Bits of one element.
    pub fn bits(self) -> u64 {
        self.facts().1
    }
}

impl fmt::Display for StoredType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.facts().0)
    }
}

/// One tensor of a safetensors file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderTensor {
    /// Its name.
    pub name: String,
    /// Type of its elements.
    pub stored: StoredType,
    /// Its dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Where it starts, in bytes from the start of the file. Any alignment occurs.
    pub start: u64,
    /// How many bytes it has: the product of the shape times the size of an element.
    pub length: u64,
}

/// The head of a safetensors file, verified against the file's length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Bytes before the data: the length field and the JSON.
    pub bytes: u64,
    /// The tensors in the order in which they lie in the file. Together they fill the rest of it exactly.
    pub tensors: Vec<HeaderTensor>,
    /// The `__metadata__` table, where there is one.
    pub metadata: BTreeMap<String, String>,
}

/// Reads the head of a safetensors file.
///
/// `bytes` are the file's first bytes, at least the whole head (the whole file will do); `file_length` is
/// the length of the file; `name` is what errors call it.
///
/// # Errors
///
/// [`CheckpointError::Header`] where the head as a whole is damaged, [`CheckpointError::HeaderTensor`] and
/// [`CheckpointError::DuplicateTensor`] where one entry is.
pub fn parse_header(bytes: &[u8], file_length: u64, name: &str) -> Result<Header, CheckpointError> {
    let damaged = |expected: &str, found: String| CheckpointError::Header {
        file: name.to_string(),
        expected: expected.to_string(),
        found,
    };
    let length_field: [u8; 8] = bytes
        .get(..8)
        .and_then(|field| field.try_into().ok())
        .ok_or_else(|| damaged("at least 8 bytes", format!("{} bytes", bytes.len())))?;
    let json_length = u64::from_le_bytes(length_field);
    if json_length > MAX_HEADER_BYTES {
        let expected = format!("a header of at most {MAX_HEADER_BYTES} bytes");
        return Err(damaged(
            &expected,
            format!("a header length of {json_length}"),
        ));
    }
    // No overflow: the limit above is far below 2^64.
    let data_start = 8 + json_length;
    if data_start > file_length {
        return Err(damaged(
            &format!("a file of at least {data_start} bytes (8 and a header of {json_length})"),
            format!("{file_length} bytes; the download is incomplete"),
        ));
    }
    let json = usize::try_from(data_start)
        .ok()
        .and_then(|end| bytes.get(8..end))
        .ok_or_else(|| {
            damaged(
                "the whole header",
                format!("its first {} bytes", bytes.len()),
            )
        })?;
    if json.first() != Some(&b'{') {
        return Err(damaged("a header that starts with {", describe_start(json)));
    }
    let entries = parse_entries(json)
        .map_err(|error| damaged("a JSON table of tensors", printable(&error.to_string())))?;

    let data_length = file_length - data_start;
    let mut seen = HashSet::with_capacity(entries.tensors.len());
    let mut tensors = Vec::with_capacity(entries.tensors.len());
    for (tensor, entry) in entries.tensors {
        // From here on a name is fit for a message.
        if tensor != printable(&tensor) {
            return Err(CheckpointError::HeaderTensor {
                file: name.to_string(),
                tensor: printable(&tensor),
                expected: "a name of at most 200 printable characters".to_string(),
                found: format!("{} bytes", tensor.len()),
            });
        }
        if !seen.insert(tensor.clone()) {
            return Err(CheckpointError::DuplicateTensor {
                file: name.to_string(),
                tensor,
                other: "the same header".to_string(),
            });
        }
        tensors.push(check_entry(tensor, entry, data_start, data_length, name)?);
    }
    tensors.sort_by_key(|tensor| (tensor.start, tensor.length));
    check_tiling(&tensors, data_start, file_length, name)?;
    Ok(Header {
        bytes: data_start,
        tensors,
        metadata: entries.metadata,
    })
}

/// The entry's facts, each checked by itself.
fn check_entry(
    tensor: String,
    entry: Entry,
    data_start: u64,
    data_length: u64,
    file: &str,
) -> Result<HeaderTensor, CheckpointError> {
    let impossible = |expected: String, found: String| CheckpointError::HeaderTensor {
        file: file.to_string(),
        tensor: tensor.clone(),
        expected,
        found,
    };
    let stored = StoredType::from_name(&entry.dtype)
        .ok_or_else(|| impossible("a known dtype".into(), printable(&entry.dtype)))?;
    if entry.shape.len() > MAX_RANK {
        let found = format!("{}", entry.shape.len());
        return Err(impossible(format!("at most {MAX_RANK} dimensions"), found));
    }
    let shape_bits = entry
        .shape
        .iter()
        .try_fold(1u64, |product, dimension| product.checked_mul(*dimension))
        .and_then(|elements| elements.checked_mul(stored.bits()))
        .ok_or_else(|| {
            impossible(
                "a size below 2^64 bits".into(),
                format!("shape {:?}", entry.shape),
            )
        })?;
    if shape_bits % 8 != 0 {
        let found = format!("{shape_bits} bits");
        return Err(impossible("a whole number of bytes".into(), found));
    }
    let [start, end] = entry.data_offsets;
    if start > end {
        return Err(impossible(
            "data_offsets in order".into(),
            format!("[{start}, {end}]"),
        ));
    }
    if end > data_length {
        return Err(impossible(
            format!("data_offsets within the file's {data_length} bytes of data"),
            format!("[{start}, {end}]; the download is incomplete or the file damaged"),
        ));
    }
    let length = end - start;
    if length != shape_bits / 8 {
        return Err(impossible(
            format!(
                "{} bytes (shape {:?} of {stored})",
                shape_bits / 8,
                entry.shape
            ),
            format!("data_offsets of {length} bytes"),
        ));
    }
    let shape = entry
        .shape
        .iter()
        .map(|dimension| usize::try_from(*dimension))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|_| impossible("an addressable size".into(), format!("{:?}", entry.shape)))?;
    Ok(HeaderTensor {
        stored,
        shape,
        start: data_start + start,
        length,
        name: tensor,
    })
}

/// The tensors, in order of their start, must fill the data exactly.
fn check_tiling(
    tensors: &[HeaderTensor],
    data_start: u64,
    file_length: u64,
    file: &str,
) -> Result<(), CheckpointError> {
    let mut end = data_start;
    let mut previous = "the header";
    for tensor in tensors {
        if tensor.start != end {
            let what = if tensor.start < end {
                "an overlap"
            } else {
                "a gap"
            };
            return Err(CheckpointError::HeaderTensor {
                file: file.to_string(),
                tensor: tensor.name.clone(),
                expected: format!(
                    "data that starts at {}, where {previous} ends",
                    end - data_start
                ),
                found: format!("{what}: data that starts at {}", tensor.start - data_start),
            });
        }
        end = tensor.start + tensor.length;
        previous = &tensor.name;
    }
    if end != file_length {
        return Err(CheckpointError::Header {
            file: file.to_string(),
            expected: format!("{end} bytes, where the last tensor ends"),
            found: format!("{file_length} bytes"),
        });
    }
    Ok(())
}

/// A tensor's entry as the JSON has it.
#[derive(serde::Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The JSON's content. Tensors are a list and not a table, so that a name given twice is seen.
struct Entries {
    tensors: Vec<(String, Entry)>,
    metadata: BTreeMap<String, String>,
}

fn parse_entries(json: &[u8]) -> serde_json::Result<Entries> {
    struct Table;
    impl<'de> Visitor<'de> for Table {
        type Value = Entries;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a table of tensors")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
            let mut entries = Entries {
                tensors: Vec::new(),
                metadata: BTreeMap::new(),
            };
            while let Some(name) = map.next_key::<String>()? {
                if name == "__metadata__" {
                    entries.metadata = map.next_value()?;
                } else {
                    entries.tensors.push((name, map.next_value()?));
                }
            }
            Ok(entries)
        }
    }
    let mut deserializer = serde_json::Deserializer::from_slice(json);
    let entries = deserializer.deserialize_map(Table)?;
    // Only the white space that pads a header may follow.
    deserializer.end()?;
    Ok(entries)
}

fn describe_start(json: &[u8]) -> String {
    match json.first() {
        None => "an empty header".to_string(),
        Some(byte) => format!("byte {byte:#04x}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(json: &str, data: usize) -> Vec<u8> {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(json.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    fn parse(json: &str, data: usize) -> Result<Header, CheckpointError> {
        let bytes = file(json, data);
        parse_header(&bytes, bytes.len() as u64, "some.safetensors")
    }

    #[test]
    fn every_type_is_known_by_its_name() {
        for (stored, name, bits) in STORED_TYPES {
            assert_eq!(StoredType::from_name(name), Some(stored));
            assert_eq!((stored.to_string().as_str(), stored.bits()), (name, bits));
        }
    }

    #[test]
    fn entries_in_any_order_with_metadata_and_padding_are_read() {
        let json = r#"{"b":{"dtype":"F32","shape":[2,1],"data_offsets":[3,11]},
            "__metadata__":{"format":"mlx"},"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},
            "empty":{"dtype":"BF16","shape":[0,7],"data_offsets":[3,3]}}   "#;
        let header = parse(json, 11).unwrap();
        let names: Vec<&str> = header
            .tensors
            .iter()
            .map(|tensor| tensor.name.as_str())
            .collect();
        assert_eq!(names, ["a", "empty", "b"]);
        assert_eq!(header.metadata["format"], "mlx");
        let last = &header.tensors[2];
        assert_eq!((last.start, last.length), (header.bytes + 3, 8));
        assert_eq!(
            (last.shape.as_slice(), last.stored),
            ([2, 1].as_slice(), StoredType::F32)
        );
        assert_eq!(header.bytes, 8 + json.len() as u64);
    }

    #[test]
    fn a_scalar_has_one_element() {
        let header = parse(
            r#"{"s":{"dtype":"I64","shape":[],"data_offsets":[0,8]}}"#,
            8,
        )
        .unwrap();
        assert_eq!(header.tensors[0].length, 8);
    }

    #[test]
    fn the_head_alone_is_enough_and_less_is_an_error() {
        let bytes = file(
            r#"{"a":{"dtype":"U8","shape":[100],"data_offsets":[0,100]}}"#,
            100,
        );
        let head = bytes.len() - 100;
        assert!(parse_header(&bytes[..head], bytes.len() as u64, "f").is_ok());
        for cut in 0..head {
            let error = parse_header(&bytes[..cut], bytes.len() as u64, "f").unwrap_err();
            assert!(
                matches!(error, CheckpointError::Header { .. }),
                "{cut}: {error}"
            );
        }
    }
}
