//! A `.gputrace` document of the next work, for Xcode's Metal debugger.

use lily_plan::DeviceError;
use objc2::runtime::ProtocolObject;
use objc2_foundation::NSURL;
use objc2_metal::{
    MTLCaptureDescriptor, MTLCaptureDestination, MTLCaptureManager, MTLCommandQueue,
};
use std::path::{Path, PathBuf};

/// What is to be captured, and whether it is being.
#[derive(Debug, Default)]
pub(crate) struct Capture {
    next: Option<PathBuf>,
    running: bool,
}

impl Capture {
    /// Asks for the next work; refuses what would fail then.
    pub fn ask(&mut self, path: &Path) -> Result<(), DeviceError> {
        let refuse = |reason: &str| {
            Err(DeviceError::Unsupported {
                device: "metal".into(),
                what: format!("a capture to {}", path.display()),
                reason: reason.into(),
            })
        };
        // SAFETY: a plain accessor of the one manager of the process.
        let manager = unsafe { MTLCaptureManager::sharedCaptureManager() };
        if !manager.supportsDestination(MTLCaptureDestination::GPUTraceDocument) {
            return refuse("set METAL_CAPTURE_ENABLED=1 in the environment");
        }
        if path.extension().is_none_or(|end| end != "gputrace") {
            return refuse("its name must end in .gputrace");
        }
        if path.exists() {
            return refuse("there is a file of that name");
        }
        self.next = Some(path.to_path_buf());
        Ok(())
    }

    /// Before command buffers are made: starts a capture that was asked for.
    pub fn start(
        &mut self,
        queue: &ProtocolObject<dyn MTLCommandQueue>,
    ) -> Result<(), DeviceError> {
        let Some(path) = self.next.take() else {
            return Ok(());
        };
        let refuse = |reason: String| DeviceError::Unsupported {
            device: "metal".into(),
            what: format!("a capture to {}", path.display()),
            reason,
        };
        let whole = std::path::absolute(&path).map_err(|error| refuse(error.to_string()))?;
        let url = NSURL::from_file_path(&whole).ok_or_else(|| refuse("no such path".into()))?;
        let descriptor = MTLCaptureDescriptor::new();
        descriptor.set_capture_command_queue(queue);
        descriptor.setDestination(MTLCaptureDestination::GPUTraceDocument);
        descriptor.setOutputURL(Some(&url));
        // SAFETY: a plain accessor of the one manager of the process.
        let manager = unsafe { MTLCaptureManager::sharedCaptureManager() };
        manager
            .startCaptureWithDescriptor_error(&descriptor)
            .map_err(|error| refuse(error.localizedDescription().to_string()))?;
        self.running = true;
        Ok(())
    }

    /// Whether one is under way.
    pub fn is_running(&self) -> bool {
        self.running
    }

    /// When the work has been waited for.
    pub fn stop(&mut self) {
        if std::mem::take(&mut self.running) {
            // SAFETY: a plain accessor of the one manager of the process.
            unsafe { MTLCaptureManager::sharedCaptureManager() }.stopCapture();
        }
    }
}
