//! Answers of the index as Python objects: the attributes are those of the twin's classes in `kvcore.index`.

use std::sync::Arc;

use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PySlice, PyString, PyTuple};

use crate::index::{Applied, Match, RankKey, Stats};

/// What one rank holds of a chain, in blocks: the reachable prefix, each position once, at its best tier.
#[pyclass(frozen, module = "tidegate_kvcore")]
pub struct RankMatch {
    key: Arc<RankKey>,
    blocks: [u32; 4],
}

#[pymethods]
impl RankMatch {
    #[new]
    #[pyo3(signature = (worker, rank, device=0, host=0, disk=0, external=0))]
    fn new(worker: &str, rank: i64, device: u32, host: u32, disk: u32, external: u32) -> Self {
        Self { key: RankKey::new(worker, rank), blocks: [device, host, disk, external] }
    }

    #[getter]
    fn worker(&self, py: Python<'_>) -> Py<PyString> {
        self.key.name.get_or_init(py, || PyString::new(py, &self.key.worker).unbind()).clone_ref(py)
    }

    #[getter]
    fn rank(&self) -> i64 {
        self.key.rank
    }

    #[getter]
    fn device(&self) -> u32 {
        self.blocks[0]
    }

    #[getter]
    fn host(&self) -> u32 {
        self.blocks[1]
    }

    #[getter]
    fn disk(&self) -> u32 {
        self.blocks[2]
    }

    #[getter]
    fn external(&self) -> u32 {
        self.blocks[3]
    }

    /// Length of the reachable prefix in blocks.
    #[getter]
    fn reach(&self) -> u32 {
        self.blocks.iter().sum()
    }

    fn __eq__(&self, py: Python<'_>, other: &Bound<'_, PyAny>) -> bool {
        if let Ok(other) = other.cast::<Self>() {
            let other = other.get();
            return self.blocks == other.blocks
                && self.key.rank == other.key.rank
                && self.key.worker == other.key.worker;
        }
        let _ = py;
        has_all(other, ["worker", "rank", "device", "host", "disk", "external"], |other| {
            let (worker, rank): (String, i64) = (get(other, "worker")?, get(other, "rank")?);
            let blocks: [u32; 4] =
                [get(other, "device")?, get(other, "host")?, get(other, "disk")?, get(other, "external")?];
            Ok(worker == self.key.worker && rank == self.key.rank && blocks == self.blocks)
        })
    }

    fn __hash__(&self, py: Python<'_>) -> PyResult<isize> {
        let [device, host, disk, external] = self.blocks;
        (self.worker(py), self.key.rank, device, host, disk, external).into_pyobject(py)?.hash()
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let [device, host, disk, external] = self.blocks;
        let worker = self.worker(py).bind(py).repr()?.to_string();
        let rank = self.key.rank;
        Ok(format!("RankMatch({worker}, {rank}, device={device}, host={host}, disk={disk}, external={external})"))
    }
}

fn get<'py, T: for<'a> FromPyObject<'a, 'py, Error = PyErr>>(object: &Bound<'py, PyAny>, name: &str) -> PyResult<T> {
    object.getattr(name)?.extract()
}

/// Compare by attributes; what lacks one, or has one of another type, is not equal.
fn has_all<'py, const N: usize>(
    other: &Bound<'py, PyAny>,
    names: [&str; N],
    same: impl FnOnce(&Bound<'py, PyAny>) -> PyResult<bool>,
) -> bool {
    names.iter().all(|name| other.hasattr(*name).unwrap_or(false)) && same(other).unwrap_or(false)
}

/// What a match found: a sequence of `RankMatch`, made one by one when they are asked for.
#[pyclass(frozen, sequence, module = "tidegate_kvcore")]
pub struct Matches {
    owners: Arc<Vec<Arc<RankKey>>>,
    found: Vec<Match>,
}

impl Matches {
    pub fn new(owners: Arc<Vec<Arc<RankKey>>>, found: Vec<Match>) -> Self {
        Self { owners, found }
    }

    fn at(&self, at: usize) -> Option<RankMatch> {
        let found = self.found.get(at)?;
        Some(RankMatch { key: self.owners.get(found.place as usize)?.clone(), blocks: found.blocks })
    }

    fn list<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        (0..self.found.len()).filter_map(|at| self.at(at)).try_for_each(|found| list.append(Bound::new(py, found)?))?;
        Ok(list)
    }
}

impl Drop for Matches {
    fn drop(&mut self) {
        Match::give_back(std::mem::take(&mut self.found));
    }
}

#[pymethods]
impl Matches {
    fn __len__(&self) -> usize {
        self.found.len()
    }

    fn __getitem__<'py>(&self, py: Python<'py>, place: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        if place.cast::<PySlice>().is_ok() {
            return self.list(py)?.as_any().get_item(place);
        }
        let place: isize = place.extract()?;
        let place = if place < 0 { place + self.found.len() as isize } else { place };
        let found = usize::try_from(place).ok().and_then(|place| self.at(place));
        let found = found.ok_or_else(|| PyIndexError::new_err("no such match"))?;
        Ok(Bound::new(py, found)?.into_any())
    }

    fn __iter__(this: Py<Self>) -> MatchIterator {
        MatchIterator { matches: this, next: 0 }
    }

    fn __eq__(&self, py: Python<'_>, other: &Bound<'_, PyAny>) -> PyResult<bool> {
        if other.cast::<PyString>().is_ok() {
            return Ok(false);
        }
        let Ok(others) = other.try_iter() else { return Ok(false) };
        let others = others.collect::<PyResult<Vec<_>>>()?;
        self.list(py)?.eq(PyList::new(py, others)?)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.list(py)?.repr()?.to_string())
    }
}

#[pyclass(module = "tidegate_kvcore")]
pub struct MatchIterator {
    matches: Py<Matches>,
    next: usize,
}

#[pymethods]
impl MatchIterator {
    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __next__(&mut self) -> Option<RankMatch> {
        let found = self.matches.get().at(self.next)?;
        self.next += 1;
        Some(found)
    }

    fn __length_hint__(&self) -> usize {
        self.matches.get().found.len().saturating_sub(self.next)
    }
}

/// Counts for metrics, in blocks: see `kvcore.index.IndexStats`.
#[pyclass(frozen, module = "tidegate_kvcore")]
pub struct IndexStats(pub Stats);

const STATS: [&str; 9] = ["ranks", "resident", "unique", "known", "held", "evicted", "dropped", "holed", "links"];

impl IndexStats {
    fn values(&self) -> [usize; 9] {
        let Stats { ranks, resident, unique, known, held, evicted, dropped, holed, links } = self.0;
        [ranks, resident, unique, known, held, evicted, dropped, holed, links]
    }
}

#[pymethods]
impl IndexStats {
    #[getter]
    fn ranks(&self) -> usize {
        self.0.ranks
    }

    #[getter]
    fn resident(&self) -> usize {
        self.0.resident
    }

    #[getter]
    fn unique(&self) -> usize {
        self.0.unique
    }

    #[getter]
    fn known(&self) -> usize {
        self.0.known
    }

    #[getter]
    fn held(&self) -> usize {
        self.0.held
    }

    #[getter]
    fn evicted(&self) -> usize {
        self.0.evicted
    }

    #[getter]
    fn dropped(&self) -> usize {
        self.0.dropped
    }

    #[getter]
    fn holed(&self) -> usize {
        self.0.holed
    }

    #[getter]
    fn links(&self) -> usize {
        self.0.links
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        has_all(other, STATS, |other| {
            for (name, value) in STATS.iter().zip(self.values()) {
                if get::<usize>(other, name)? != value {
                    return Ok(false);
                }
            }
            Ok(true)
        })
    }

    fn __hash__(&self, py: Python<'_>) -> PyResult<isize> {
        PyTuple::new(py, self.values())?.hash()
    }

    fn __repr__(&self) -> String {
        let values = STATS.iter().zip(self.values()).map(|(name, value)| format!("{name}={value}"));
        format!("IndexStats({})", values.collect::<Vec<_>>().join(", "))
    }
}

/// What one batch did: see `kvcore.residency.ApplyResult`.
#[pyclass(frozen, module = "tidegate_kvcore")]
pub struct ApplyResult(pub Applied);

const APPLIED: [&str; 8] =
    ["stored", "removed", "cleared", "held", "unknown_removed", "other_groups", "dropped", "evicted"];

impl ApplyResult {
    fn values(&self) -> [usize; 8] {
        let Applied { stored, removed, cleared, held, unknown_removed, other_groups, dropped, evicted, .. } = self.0;
        [stored, removed, cleared, held, unknown_removed, other_groups, dropped, evicted]
    }
}

#[pymethods]
impl ApplyResult {
    #[getter]
    fn stored(&self) -> usize {
        self.0.stored
    }

    #[getter]
    fn removed(&self) -> usize {
        self.0.removed
    }

    #[getter]
    fn cleared(&self) -> usize {
        self.0.cleared
    }

    #[getter]
    fn held(&self) -> usize {
        self.0.held
    }

    #[getter]
    fn unknown_removed(&self) -> usize {
        self.0.unknown_removed
    }

    #[getter]
    fn other_groups(&self) -> usize {
        self.0.other_groups
    }

    #[getter]
    fn dropped(&self) -> usize {
        self.0.dropped
    }

    #[getter]
    fn evicted(&self) -> usize {
        self.0.evicted
    }

    #[getter]
    fn block_size(&self) -> Option<u64> {
        self.0.block_size
    }

    /// Events by reason, as a `collections.Counter`.
    #[getter]
    fn rejected<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let counts = PyDict::new(py);
        self.0.rejected().try_for_each(|(reason, count)| counts.set_item(reason, count))?;
        py.import("collections")?.getattr("Counter")?.call1((counts,))
    }

    fn __eq__(&self, py: Python<'_>, other: &Bound<'_, PyAny>) -> PyResult<bool> {
        let rejected = self.rejected(py)?;
        Ok(has_all(other, APPLIED, |other| {
            for (name, value) in APPLIED.iter().zip(self.values()) {
                if get::<usize>(other, name)? != value {
                    return Ok(false);
                }
            }
            Ok(get::<Option<u64>>(other, "block_size")? == self.0.block_size
                && rejected.eq(other.getattr("rejected")?)?)
        }))
    }

    fn __repr__(&self) -> String {
        let mut values: Vec<_> =
            APPLIED.iter().zip(self.values()).map(|(name, value)| format!("{name}={value}")).collect();
        values.push(self.0.block_size.map_or("block_size=None".into(), |size| format!("block_size={size}")));
        let rejected: Vec<_> = self.0.rejected().map(|(reason, count)| format!("'{reason}': {count}")).collect();
        format!("ApplyResult({}, rejected={{{}}})", values.join(", "), rejected.join(", "))
    }
}
