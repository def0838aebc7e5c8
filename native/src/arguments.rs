//! Arguments from Python: buffers of tokens or bytes, texts, multimodal objects.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

/// Buffers from this size on are worked on with the GIL released; below it, releasing costs more than it frees.
pub const DETACH_BYTES: usize = 32 * 1024;

/// Run `work` on the bytes of any C-contiguous buffer, with the GIL released if it is `bytes` of `detach_from` and more:
/// any other buffer could change under our hands.
pub fn with_bytes<T: Send>(
    py: Python<'_>,
    object: &Bound<'_, PyAny>,
    detach_from: usize,
    work: impl FnOnce(&[u8]) -> T + Send,
) -> PyResult<T> {
    if let Ok(bytes) = object.cast::<PyBytes>() {
        return Ok(run(py, bytes.as_bytes(), detach_from, work));
    }
    let buffer = PyUntypedBuffer::get(object)?;
    if !buffer.is_c_contiguous() {
        return Err(PyValueError::new_err("the buffer must be contiguous"));
    }
    let bytes = match buffer.len_bytes() {
        0 => &[][..],
        // SAFETY: the buffer is contiguous, holds this many initialised bytes, and stays exported until the end of this
        // function. Nobody writes to it meanwhile: the GIL is held. (A read-only view may still be of something that
        // others can write to, so that only exact `bytes` are worked on without the GIL.)
        length => unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast::<u8>(), length) },
    };
    Ok(run(py, bytes, usize::MAX, work))
}

fn run<T: Send>(py: Python<'_>, bytes: &[u8], detach_from: usize, work: impl FnOnce(&[u8]) -> T + Send) -> T {
    if bytes.len() >= detach_from { py.detach(|| work(bytes)) } else { work(bytes) }
}

/// UTF-8 of an optional text; a lone surrogate is encoded like any other code point, as the Python twin does.
pub fn text_bytes(text: Option<&Bound<'_, PyString>>) -> PyResult<Vec<u8>> {
    let Some(text) = text else { return Ok(Vec::new()) };
    if let Ok(text) = text.to_str() {
        return Ok(text.as_bytes().to_vec());
    }
    text.call_method1("encode", ("utf-8", "surrogatepass"))?.extract()
}

/// Multimodal hashes from a mapping of block position to u64 hashes.
pub fn multimodal(mapping: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<(usize, Vec<u64>)>> {
    let mut objects = Vec::new();
    if let Some(mapping) = mapping {
        for item in mapping.call_method0("items")?.try_iter()? {
            let (position, hashes): (i64, Vec<u64>) = item?.extract()?;
            if let Ok(position) = usize::try_from(position) {
                objects.push((position, hashes));
            }
        }
    }
    objects.sort_unstable_by_key(|(position, _)| *position);
    Ok(objects)
}
