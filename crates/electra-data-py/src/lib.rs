//! The Python module `electra_fast._data`: each function parses, detaches from the GIL and calls
//! `electra-data`.

use pyo3::prelude::*;

#[pymodule]
mod _data {
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
}
