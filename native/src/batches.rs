//! Decoded events as Python objects: the attributes are those of the twin's structs in `kvcore.events`.

use std::sync::Arc;

use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::BadBatchError;
use crate::arguments::{DETACH_BYTES, with_bytes};
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
pub struct Stored(Arc<events::Stored>);

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
pub struct Removed(Arc<events::Removed>);

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

/// One payload. The events are made into Python objects when they are first asked for.
#[pyclass(frozen, module = "tidegate_kvcore")]
pub struct Batch {
    batch: events::Batch,
    tuple: PyOnceLock<Py<PyTuple>>,
}

impl Batch {
    pub fn events(&self) -> &[Event] {
        &self.batch.events
    }

    pub fn rejected_counts(&self) -> &[u64; Reason::ALL.len()] {
        &self.batch.rejected
    }
}

#[pymethods]
impl Batch {
    #[getter]
    fn ts(&self) -> f64 {
        self.batch.ts
    }

    #[getter]
    fn rank(&self) -> Option<u32> {
        self.batch.rank
    }

    #[getter]
    fn unknown_media(&self) -> u64 {
        self.batch.unknown_media
    }

    #[getter(events)]
    fn events_tuple(&self, py: Python<'_>) -> PyResult<Py<PyTuple>> {
        let make = || {
            let events = self.batch.events.iter().map(|event| match event {
                Event::Stored(stored) => Stored(stored.clone()).into_py_any(py),
                Event::Removed(removed) => Removed(removed.clone()).into_py_any(py),
                Event::Cleared => Cleared.into_py_any(py),
            });
            Ok::<_, PyErr>(PyTuple::new(py, events.collect::<PyResult<Vec<_>>>()?)?.unbind())
        };
        self.tuple.get_or_try_init(py, make).map(|tuple| tuple.clone_ref(py))
    }

    /// Whether the engine emptied its pool.
    #[getter]
    fn cleared(&self) -> bool {
        self.batch.events.iter().any(|event| matches!(event, Event::Cleared))
    }

    /// Events left out, by reason.
    #[getter]
    fn rejected<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let rejected = PyDict::new(py);
        for reason in Reason::ALL {
            match self.batch.rejected[reason as usize] {
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
    let batch = with_bytes(py, payload, DETACH_BYTES, events::decode_batch)?.map_err(BadBatchError::new_err)?;
    Ok(Batch { batch, tuple: PyOnceLock::new() })
}
