//! Decoded events as Python objects: the attributes are those of the twin's structs in `kvcore.events`.

use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::BadBatchError;
use crate::arguments::with_bytes;
use crate::events::{self, Event, Reason};

/// An integer that an engine sent: anything between `i64::MIN` and `u64::MAX`.
fn integer(py: Python<'_>, value: i128) -> PyResult<Py<PyAny>> {
    match i64::try_from(value) {
        Ok(value) => value.into_py_any(py),
        Err(_) => (value as u64).into_py_any(py),
    }
}

/// Blocks became resident, in chain order.
#[pyclass(frozen, module = "tidegate_kvcore")]
pub struct Stored(pub Box<events::Stored>);

#[pymethods]
impl Stored {
    #[getter]
    fn hashes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.0.hashes)
    }

    #[getter]
    fn parent(&self) -> Option<u64> {
        self.0.parent
    }

    #[getter]
    fn tokens<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.tokens)
    }

    #[getter]
    fn block_size(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        integer(py, self.0.block_size)
    }

    #[getter]
    fn tier(&self) -> u8 {
        self.0.place.tier
    }

    #[getter]
    fn connector(&self) -> bool {
        self.0.place.connector
    }

    #[getter]
    fn adapter(&self) -> Option<&str> {
        self.0.adapter.as_deref()
    }

    #[getter]
    fn salt(&self) -> Option<&str> {
        self.0.salt.as_deref()
    }

    #[getter]
    fn mm<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let mm = PyDict::new(py);
        for (position, hashes) in &self.0.mm {
            mm.set_item(position, PyTuple::new(py, hashes)?)?;
        }
        Ok(mm)
    }

    #[getter]
    fn group(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        self.0.group.map(|group| integer(py, group)).transpose()
    }

    #[getter]
    fn group_kind(&self) -> Option<&str> {
        self.0.group_kind.as_deref()
    }

    #[getter]
    fn session_id(&self) -> Option<&str> {
        self.0.session_id.as_deref()
    }

    #[getter]
    fn eagle(&self) -> bool {
        self.0.eagle
    }

    #[getter]
    fn misaligned(&self) -> bool {
        self.0.misaligned
    }

    /// Tokens over hashes: the block size that was really used; 0 without tokens.
    #[getter]
    fn tokens_per_block(&self) -> usize {
        self.0.tokens_per_block()
    }
}

/// One copy of each of these blocks left its tier.
#[pyclass(frozen, module = "tidegate_kvcore")]
pub struct Removed(events::Removed);

#[pymethods]
impl Removed {
    #[getter]
    fn hashes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.0.hashes)
    }

    #[getter]
    fn tier(&self) -> u8 {
        self.0.place.tier
    }

    #[getter]
    fn group(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        self.0.group.map(|group| integer(py, group)).transpose()
    }
}

/// The engine emptied its pool.
#[pyclass(frozen, module = "tidegate_kvcore")]
pub struct Cleared;

/// One payload.
#[pyclass(frozen, module = "tidegate_kvcore")]
pub struct Batch {
    #[pyo3(get)]
    ts: f64,
    #[pyo3(get)]
    rank: Option<u32>,
    #[pyo3(get)]
    events: Py<PyTuple>,
    rejected: [u64; Reason::ALL.len()],
    #[pyo3(get)]
    unknown_media: u64,
}

#[pymethods]
impl Batch {
    /// Events left out, by reason.
    #[getter]
    fn rejected<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let rejected = PyDict::new(py);
        for reason in Reason::ALL {
            match self.rejected[reason as usize] {
                0 => {}
                count => rejected.set_item(reason.name(), count)?,
            }
        }
        Ok(rejected)
    }
}

/// Decode one engine payload (MessagePack). Raises `BadBatchError` when it is not a batch at all.
#[pyfunction]
pub fn decode_batch(py: Python<'_>, payload: &Bound<'_, PyAny>) -> PyResult<Batch> {
    let batch = with_bytes(py, payload, events::decode_batch)?.map_err(BadBatchError::new_err)?;
    let events = batch
        .events
        .into_iter()
        .map(|event| match event {
            Event::Stored(stored) => Stored(stored).into_py_any(py),
            Event::Removed(removed) => Removed(removed).into_py_any(py),
            Event::Cleared => Cleared.into_py_any(py),
        })
        .collect::<PyResult<Vec<_>>>()?;
    Ok(Batch {
        ts: batch.ts,
        rank: batch.rank,
        events: PyTuple::new(py, events)?.unbind(),
        rejected: batch.rejected,
        unknown_media: batch.unknown_media,
    })
}
