//! Record batches, exported through the Arrow PyCapsule interface or as one buffer.

use std::ffi::{c_int, c_void};

use arrow_array::cast::AsArray;
use arrow_array::ffi::{FFI_ArrowArray, FFI_ArrowSchema};
use arrow_array::types::Int32Type;
use arrow_array::{Array, Int32Array, StructArray};
use pyo3::exceptions::{PyBufferError, PyRuntimeError};
use pyo3::types::{PyByteArray, PyCapsule};
use pyo3::{ffi, prelude::*};

const WORD: usize = 4;

/// A record batch that any Arrow library can import without copying.
#[pyclass(frozen, module = "electra_fast._data")]
pub struct RecordBatch {
    batch: arrow_array::RecordBatch,
    /// First word and words per row of each fixed-size column in the shared buffer; empty if there is none.
    layout: Vec<(usize, usize)>,
}

impl RecordBatch {
    pub fn new(batch: arrow_array::RecordBatch) -> Self {
        let layout = layout(&batch).unwrap_or_default();
        Self { batch, layout }
    }
}

#[pymethods]
impl RecordBatch {
    #[getter]
    fn num_rows(&self) -> usize {
        self.batch.num_rows()
    }

    fn __arrow_c_schema__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        let schema = FFI_ArrowSchema::try_from(self.batch.schema_ref().as_ref())
            .map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        // A capsule that was not imported drops its struct, which calls the release callback.
        PyCapsule::new_with_value(py, schema, c"arrow_schema")
    }

    /// Capsules with schema and data. A requested schema is ignored, as the protocol permits.
    #[pyo3(signature = (requested_schema = None))]
    fn __arrow_c_array__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<Bound<'py, PyAny>>,
    ) -> PyResult<(Bound<'py, PyCapsule>, Bound<'py, PyCapsule>)> {
        drop(requested_schema);
        let array = FFI_ArrowArray::new(&StructArray::from(self.batch.clone()).to_data());
        let array = PyCapsule::new_with_value(py, array, c"arrow_array")?;
        Ok((self.__arrow_c_schema__(py)?, array))
    }

    /// First word and words per row of each fixed-size column in this object's buffer. Empty if they share no
    /// buffer, as in a batch without rows.
    #[getter]
    fn layout(&self) -> Vec<(usize, usize)> {
        self.layout.clone()
    }

    /// `cu_seqlens` as the bytes of int32: 0 and the ends of all segments and padding tails.
    fn segment_ends<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyByteArray>> {
        let unlike = || PyRuntimeError::new_err("the batch has no column of segment lengths");
        let row_length = self.layout.first().ok_or_else(unlike)?.1 as i32;
        let lists = self.batch.column_by_name("segment_lengths").ok_or_else(unlike)?;
        let lists = lists.as_list_opt::<i32>().ok_or_else(unlike)?;
        let lengths = lists.values().as_primitive_opt::<Int32Type>().ok_or_else(unlike)?.values();
        let mut ends = Vec::with_capacity(lengths.len() + lists.len() + 1);
        let (mut end, mut row_end) = (0, 0);
        ends.push(0);
        for range in lists.offsets().windows(2) {
            for length in &lengths[range[0] as usize..range[1] as usize] {
                end += length;
                ends.push(end);
            }
            row_end += row_length;
            if end < row_end {
                end = row_end;
                ends.push(end);
            }
        }
        Ok(PyByteArray::new(py, Int32Array::from(ends).values().inner().as_slice()))
    }

    /// Shares the memory of all fixed-size columns (see `layout`), writable as their tensors are.
    ///
    /// # Safety
    /// For CPython to call, which passes a view to fill.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let Some((start, bytes)) = slf.get().memory() else {
            return Err(PyBufferError::new_err("the columns of this batch share no buffer"));
        };
        // SAFETY: CPython passes a view to fill. The memory is one allocation that lives as long as `slf`,
        // which the view keeps alive. It is writable, and this crate neither reads nor reuses it before `slf`
        // is dropped and with it the last reference to the batch.
        let status = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, bytes, 0, flags) };
        if status == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }

    fn __repr__(&self) -> String {
        let names: Vec<_> =
            self.batch.schema_ref().fields().iter().map(|field| field.name().clone()).collect();
        format!("<RecordBatch of {} rows: {}>", self.batch.num_rows(), names.join(", "))
    }
}

impl RecordBatch {
    /// Start and length in bytes of the allocation that holds all fixed-size columns.
    fn memory(&self) -> Option<(*mut c_void, isize)> {
        let rows = self.batch.num_rows();
        let words = self.layout.iter().map(|&(first, width)| first + width * rows).max()?;
        let values = self.batch.columns().first()?.as_fixed_size_list_opt()?.values().to_data();
        let start = values.buffers().first()?.data_ptr();
        Some((start.as_ptr().cast(), (words * WORD) as isize))
    }
}

/// First word and words per row of each fixed-size column, if all of them share one allocation.
fn layout(batch: &arrow_array::RecordBatch) -> Option<Vec<(usize, usize)>> {
    let mut allocation = None;
    let lists = batch.columns().iter().filter_map(|column| column.as_fixed_size_list_opt());
    let places = lists.map(|list| {
        let values = list.values().to_data();
        let buffer = values.buffers().first().filter(|buffer| !buffer.is_empty())?;
        let shared = *allocation.get_or_insert(buffer.data_ptr()) == buffer.data_ptr();
        let whole = values.offset() == 0 && list.offset() == 0 && buffer.ptr_offset() % WORD == 0;
        (shared && whole).then(|| (buffer.ptr_offset() / WORD, list.value_length() as usize))
    });
    places.collect()
}
