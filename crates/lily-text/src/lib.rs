//! (see the crate's modules)
