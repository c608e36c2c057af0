//! What it means that a command buffer ended in an error, and what to do about it.

use lily_plan::DeviceError;

/// Codes of `MTLCommandBufferErrorDomain`.
mod code {
    pub const TIMEOUT: isize = 2;
    pub const PAGE_FAULT: isize = 3;
    pub const ACCESS_REVOKED: isize = 4;
    pub const OUT_OF_MEMORY: isize = 8;
}

/// A command buffer that ended in an error.
pub(crate) struct Fault<'a> {
    /// Which one.
    pub label: &'a str,
    /// Metal's code for it.
    pub code: isize,
    /// Metal's words.
    pub text: &'a str,
    /// What the GPU's memory held then.
    pub allocated: u64,
    /// What the system recommends at most.
    pub recommended: u64,
}

impl Fault<'_> {
    /// As the engine is told of it. The driver's own names are in the text, and tell more than the code.
    pub fn error(&self) -> DeviceError {
        let Fault {
            label, code, text, ..
        } = self;
        if *code == code::OUT_OF_MEMORY || text.contains("Insufficient Memory") {
            return DeviceError::OutOfMemory {
                what: format!("running {label}"),
                bytes: self.allocated,
                reason: format!(
                    "the system could not keep that much ready for the GPU, of which it recommends {} at most: {text}",
                    self.recommended
                ),
            };
        }
        let remedy = if text.contains("Impacting Interactivity") {
            "the display's watchdog ended it, because it kept the display waiting: a smaller --chunk makes shorter \
             pieces, and a display that sleeps does not wait"
        } else if *code == code::TIMEOUT || text.contains("Timeout") || text.contains("Hang") {
            "it took longer than the system allows: a smaller --chunk makes shorter pieces"
        } else if *code == code::ACCESS_REVOKED || text.contains("prior/excessive") {
            "the system no longer lets this program use the GPU, after errors before: start it again"
        } else if *code == code::PAGE_FAULT {
            "a kernel reached memory that is not its own: this is a defect of Lily"
        } else if text.contains("victim") || text.contains("Victim") {
            "another program's error on the GPU ended it: try again"
        } else {
            "the GPU could not finish it"
        };
        DeviceError::Failed(format!(
            "{label}: {remedy} (Metal says, code {code}: {text})"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(code: isize, text: &str) -> DeviceError {
        let fault = Fault {
            label: "command buffer 2 of 3",
            code,
            text,
            allocated: 21,
            recommended: 20,
        };
        fault.error()
    }

    #[test]
    fn memory_is_told_with_the_numbers() {
        for (code, text) in [
            (8, "something"),
            (
                1,
                "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
            ),
        ] {
            let DeviceError::OutOfMemory {
                what,
                bytes,
                reason,
            } = error(code, text)
            else {
                panic!("{text}: not told as memory")
            };
            assert_eq!(
                (what.as_str(), bytes),
                ("running command buffer 2 of 3", 21)
            );
            assert!(reason.contains("20") && reason.contains(text), "{reason}");
        }
    }

    /// The texts are the driver's, as users of other programs quote them.
    #[test]
    fn each_kind_has_its_remedy_and_the_drivers_words() {
        for (code, text, remedy) in [
            (
                1,
                "Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)",
                "--chunk",
            ),
            (
                2,
                "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)",
                "--chunk",
            ),
            (
                1,
                "Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang)",
                "--chunk",
            ),
            (
                4,
                "Ignored (for causing prior/excessive GPU errors)",
                "start it again",
            ),
            (3, "Caused GPU Address Fault Error", "defect"),
            (
                1,
                "Discarded (victim of GPU error/recovery)",
                "another program",
            ),
            (1, "Internal Error (0000000a)", "could not finish"),
        ] {
            let message = error(code, text).to_string();
            for part in [text, remedy, "command buffer 2 of 3"] {
                assert!(message.contains(part), "{part}: {message}");
            }
        }
    }
}
