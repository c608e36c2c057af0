//! What a compiled kernel needs, read from the ELF file that the driver loads.
//!
//! Every section is a table of known layout: a header of 4 bytes (format, attribute, and a 16-bit value or the
//! length of what follows). Names and numbers are those that `cuobjdump --dump-elf` prints.

use std::collections::BTreeMap;

/// What a kernel takes of a multiprocessor, and how it is called.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct KernelResources {
    /// The kernel's name.
    pub name: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of a thread's stack in local memory: registers that had to be spilled, and arrays that are indexed
    /// at run time. A fast kernel has none.
    pub local_bytes: u32,
    /// Bytes of threadgroup memory that the kernel itself declares, without what the launch adds.
    pub threadgroup_bytes: u32,
    /// The most threads that a threadgroup may have, if the kernel says so.
    pub max_threads: Option<u32>,
    /// Bytes of each parameter of the entry, in order.
    pub parameters: Vec<u32>,
}

const REGISTERS: u8 = 0x2f;
const FRAME_SIZE: u8 = 0x11;
const MIN_STACK_SIZE: u8 = 0x12;
const MAX_THREADS: u8 = 0x05;
const PARAMETER: u8 = 0x17;
/// The format of an attribute whose header gives a length, and of one without a value.
const SIZED: u8 = 4;

/// On GPUs of compute capability 9.0 and later, each kernel's section counts what the system keeps for itself too; a
/// section of its own says so.
const RESERVED_THREADGROUP_BYTES: u32 = 1024;
const RESERVED_SECTION: &str = ".nv.shared.reserved.0";

/// The kernels of a cubin, by name; `None` if it is none.
pub(crate) fn kernels(file: &[u8]) -> Option<Vec<KernelResources>> {
    let elf = Elf::parse(file)?;
    let mut kernels: BTreeMap<&str, KernelResources> = BTreeMap::new();
    for section in &elf.sections {
        if let Some(name) = section.name.strip_prefix(".nv.info.") {
            let kernel = kernels.entry(name).or_default();
            kernel.name = name.to_owned();
            for attribute in attributes(section.bytes)? {
                kernel.note(&attribute)?;
            }
        }
    }
    let table = elf.section(".nv.info")?;
    for attribute in attributes(table.bytes)? {
        if !matches!(attribute.kind, REGISTERS | FRAME_SIZE | MIN_STACK_SIZE) {
            continue;
        }
        let symbol = elf.symbol_name(read_u32(attribute.value, 0)?)?;
        let value = read_u32(attribute.value, 4)?;
        // Functions that were not inlined are listed too.
        let Some(kernel) = kernels.get_mut(symbol) else {
            continue;
        };
        match attribute.kind {
            REGISTERS => kernel.registers = value,
            _ => kernel.local_bytes = kernel.local_bytes.max(value),
        }
    }
    for section in &elf.sections {
        let name = section.name.strip_prefix(".nv.shared.");
        if let Some(kernel) = name.and_then(|name| kernels.get_mut(name)) {
            let reserved = match elf.section(RESERVED_SECTION) {
                Some(_) => RESERVED_THREADGROUP_BYTES,
                None => 0,
            };
            kernel.threadgroup_bytes = section.size.saturating_sub(reserved);
        }
    }
    Some(kernels.into_values().collect())
}

impl KernelResources {
    fn note(&mut self, attribute: &Attribute) -> Option<()> {
        match attribute.kind {
            MAX_THREADS => {
                let sizes = [0, 4, 8].map(|at| read_u32(attribute.value, at));
                self.max_threads = Some(sizes[0]? * sizes[1]? * sizes[2]?);
            }
            PARAMETER => {
                let ordinal = usize::from(read_u16(attribute.value, 4)?);
                // Above the alignment of what it points to, its memory and its bank.
                let bytes = read_u32(attribute.value, 8)? >> 18;
                if self.parameters.len() <= ordinal {
                    self.parameters.resize(ordinal + 1, 0);
                }
                self.parameters[ordinal] = bytes;
            }
            _ => {}
        }
        Some(())
    }
}

struct Attribute<'a> {
    kind: u8,
    value: &'a [u8],
}

fn attributes(mut bytes: &[u8]) -> Option<Vec<Attribute<'_>>> {
    let mut all = Vec::new();
    while !bytes.is_empty() {
        let header = bytes.get(..4)?;
        let length = match header[0] {
            SIZED => usize::from(read_u16(header, 2)?),
            _ => 0,
        };
        all.push(Attribute {
            kind: header[1],
            value: bytes.get(4..4 + length)?,
        });
        bytes = &bytes[4 + length..];
    }
    Some(all)
}

struct Section<'a> {
    name: &'a str,
    /// Empty if it takes no room in the file.
    bytes: &'a [u8],
    size: u32,
}

struct Elf<'a> {
    sections: Vec<Section<'a>>,
}

impl<'a> Elf<'a> {
    fn parse(file: &'a [u8]) -> Option<Self> {
        const CUDA_MACHINE: u16 = 190;
        const NO_BITS: u32 = 8;
        if !file.starts_with(b"\x7fELF\x02\x01") || read_u16(file, 18)? != CUDA_MACHINE {
            return None;
        }
        let table = usize::try_from(read_u64(file, 40)?).ok()?;
        let entry = usize::from(read_u16(file, 58)?);
        let count = usize::from(read_u16(file, 60)?);
        let names_at = usize::from(read_u16(file, 62)?);
        let header = |number: usize| file.get(table + number * entry..)?.get(..64);
        let bytes = |header: &[u8]| {
            let offset = usize::try_from(read_u64(header, 24)?).ok()?;
            let size = usize::try_from(read_u64(header, 32)?).ok()?;
            file.get(offset..offset.checked_add(size)?)
        };
        let names = bytes(header(names_at)?)?;
        let mut sections = Vec::with_capacity(count);
        for number in 0..count {
            let header = header(number)?;
            let in_file = !matches!(read_u32(header, 4)?, 0 | NO_BITS);
            sections.push(Section {
                name: text(names, read_u32(header, 0)?)?,
                bytes: if in_file { bytes(header)? } else { &[] },
                size: u32::try_from(read_u64(header, 32)?).ok()?,
            });
        }
        Some(Self { sections })
    }

    fn section(&self, name: &str) -> Option<&Section<'a>> {
        self.sections.iter().find(|section| section.name == name)
    }

    fn symbol_name(&self, number: u32) -> Option<&'a str> {
        const SYMBOL_BYTES: usize = 24;
        let symbols = self.section(".symtab")?.bytes;
        let at = usize::try_from(number).ok()?.checked_mul(SYMBOL_BYTES)?;
        text(self.section(".strtab")?.bytes, read_u32(symbols, at)?)
    }
}

fn text(names: &[u8], at: u32) -> Option<&str> {
    let rest = names.get(usize::try_from(at).ok()?..)?;
    let end = rest.iter().position(|byte| *byte == 0)?;
    std::str::from_utf8(&rest[..end]).ok()
}

fn read_u16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..)?.first_chunk().copied()?))
}

fn read_u32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..)?.first_chunk().copied()?))
}

fn read_u64(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..)?.first_chunk().copied()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(values: &[u32]) -> Vec<u8> {
        values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect()
    }

    /// Sections of (name, kind, bytes, size) after each other, then their table.
    fn elf(sections: &[(&str, u32, Vec<u8>, u64)]) -> Vec<u8> {
        let mut names = vec![0_u8];
        let mut file = vec![0_u8; 64];
        let mut headers = vec![[0_u8; 64]];
        let mut add = |file: &mut Vec<u8>, name: u32, kind: u32, bytes: &[u8], size: u64| {
            let mut header = [0; 64];
            header[..4].copy_from_slice(&name.to_le_bytes());
            header[4..8].copy_from_slice(&kind.to_le_bytes());
            header[24..32].copy_from_slice(&(file.len() as u64).to_le_bytes());
            header[32..40].copy_from_slice(&size.to_le_bytes());
            file.extend(bytes);
            headers.push(header);
        };
        for (name, kind, bytes, size) in sections {
            let at = names.len() as u32;
            names.extend(name.bytes().chain([0]));
            add(&mut file, at, *kind, bytes, *size);
        }
        let length = names.len() as u64;
        add(&mut file, 0, 3, &names, length);
        let table = file.len() as u64;
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        file[18..20].copy_from_slice(&190_u16.to_le_bytes());
        file[40..48].copy_from_slice(&table.to_le_bytes());
        file[58..60].copy_from_slice(&64_u16.to_le_bytes());
        file[60..62].copy_from_slice(&(headers.len() as u16).to_le_bytes());
        file[62..64].copy_from_slice(&(headers.len() as u16 - 1).to_le_bytes());
        file.extend(headers.concat());
        file
    }

    fn example() -> Vec<u8> {
        let attribute = |kind: u8, value: &[u32]| {
            let mut bytes = vec![SIZED, kind, value.len() as u8 * 4, 0];
            bytes.extend(words(value));
            bytes
        };
        let mut symbol = vec![0; 24];
        symbol.extend(words(&[1, 0, 0, 0, 0, 0]));
        let all = [
            attribute(REGISTERS, &[1, 42]),
            attribute(FRAME_SIZE, &[1, 8]),
            attribute(MIN_STACK_SIZE, &[1, 24]),
        ];
        let own = [
            attribute(PARAMETER, &[0, 1, 4 << 18 | 0x1_f000]),
            attribute(PARAMETER, &[0, 0, 8 << 18 | 0x1_f000]),
            vec![1, 0x50, 0, 0],
            attribute(MAX_THREADS, &[128, 2, 1]),
        ];
        let section = |name, bytes: Vec<u8>| {
            let size = bytes.len() as u64;
            (name, 1, bytes, size)
        };
        elf(&[
            section(".strtab", b"\0gemv\0".to_vec()),
            section(".symtab", symbol),
            section(".nv.info", all.concat()),
            section(".nv.info.gemv", own.concat()),
            (".nv.shared.gemv", 8, Vec::new(), 1024 + 96),
            (".nv.shared.reserved.0", 8, Vec::new(), 0),
        ])
    }

    #[test]
    fn resources_are_read() {
        let expected = KernelResources {
            name: "gemv".to_owned(),
            registers: 42,
            local_bytes: 24,
            threadgroup_bytes: 96,
            max_threads: Some(256),
            parameters: vec![8, 4],
        };
        assert_eq!(kernels(&example()), Some(vec![expected]));
    }

    #[test]
    fn what_is_cut_off_is_refused() {
        let whole = example();
        for length in 0..whole.len() {
            assert_eq!(kernels(&whole[..length]), None, "{length} bytes");
        }
    }
}
