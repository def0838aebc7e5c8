//! `PrefixIndex` for Python.
//!
//! The index stands behind a lock. Nobody makes Python objects, or waits for the GIL, while holding it: collecting garbage
//! may drop ranks that were set aside, which takes the lock.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};

use crate::arguments::{DETACH_BYTES, with_bytes};
use crate::batches::Batch;
use crate::converting::read_batch;
use crate::events::{self, Event};
use crate::index::{Applied, Bounds, Given, Index, Limits, Rank, Residency, copies_in};
use crate::results::{ApplyResult, IndexStats, Matches};
use crate::steps::{DiscardSteps, DumpSteps, PrepareSteps, PreparedRanks};
use crate::{BadBatchError, HashesError};

/// Batches with so many blocks are applied with the GIL released.
const DETACH_BLOCKS: usize = 1024;
/// Chains up to so many bytes are matched without releasing the GIL while nobody writes: that takes microseconds, getting
/// the GIL back from a busy Python thread takes its switch interval, milliseconds.
const KEEP_BYTES: usize = 4096 * 8;

/// The index, which its iterators share.
pub struct Shared(RwLock<Index>);

impl Shared {
    pub fn read(&self) -> RwLockReadGuard<'_, Index> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn write(&self) -> RwLockWriteGuard<'_, Index> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Presence of every block of every rank that it was told of: see `kvcore.index`.
#[pyclass(frozen, module = "tidegate_kvcore")]
pub struct PrefixIndex {
    shared: Arc<Shared>,
    #[pyo3(get)]
    limits: Py<PyAny>,
}

fn u64s(py: Python<'_>, hashes: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    with_bytes(py, hashes, usize::MAX, |bytes| match bytes.as_chunks() {
        (hashes, []) => Ok(hashes.iter().map(|hash| u64::from_le_bytes(*hash)).collect()),
        _ => Err(HashesError::new_err(format!("{} bytes are not whole u64 hashes", bytes.len()))),
    })?
}

fn bound(limits: &Bound<'_, PyAny>, name: &str) -> PyResult<usize> {
    let value: i128 = limits.getattr(name)?.extract()?;
    Ok(usize::try_from(value.max(0)).unwrap_or(usize::MAX))
}

#[pymethods]
impl PrefixIndex {
    #[new]
    #[pyo3(signature = (limits=None))]
    fn new(py: Python<'_>, limits: Option<Bound<'_, PyAny>>) -> PyResult<Self> {
        let limits = match limits {
            Some(limits) => limits,
            None => py.import("kvcore.index")?.getattr("IndexLimits")?.call0()?,
        };
        let group = Bounds { held: bound(&limits, "max_held")?, remembered: bound(&limits, "max_remembered")? };
        let (blocks, links) = (bound(&limits, "max_blocks")?, bound(&limits, "links")?);
        let index = Index::new(Limits { blocks, links, group });
        Ok(Self { shared: Arc::new(Shared(RwLock::new(index))), limits: limits.unbind() })
    }

    /// Apply one batch, its events in order. `rank` counts, whatever the batch says of itself.
    fn apply(&self, py: Python<'_>, worker: &str, rank: i64, batch: &Bound<'_, PyAny>) -> PyResult<ApplyResult> {
        let (made, mut applied);
        let events = if let Ok(batch) = batch.cast::<Batch>() {
            let batch = batch.get();
            applied = Applied::new(batch.rejected_counts());
            batch.events()
        } else {
            (made, applied) = read_batch(batch)?;
            &made
        };
        let blocks: usize = events
            .iter()
            .map(|event| match event {
                Event::Stored(stored) => stored.hashes.len(),
                Event::Removed(removed) => removed.hashes.len(),
                Event::Cleared => DETACH_BLOCKS,
            })
            .sum();
        if blocks < DETACH_BLOCKS {
            self.shared.write().apply(worker, rank, &mut events.iter().map(Event::view), &mut applied);
        } else {
            py.detach(|| self.shared.write().apply(worker, rank, &mut events.iter().map(Event::view), &mut applied));
        }
        Ok(ApplyResult(applied))
    }

    /// Decode and apply one engine payload. Raises `BadBatchError` when it is not a batch at all, with nothing applied.
    fn apply_payload(
        &self,
        py: Python<'_>,
        worker: &str,
        rank: i64,
        payload: &Bound<'_, PyAny>,
    ) -> PyResult<ApplyResult> {
        let applied: Result<_, String> = with_bytes(py, payload, DETACH_BYTES, |payload| {
            events::with_events(payload, |events, rejected| {
                let mut applied = Applied::new(rejected);
                self.shared.write().apply(worker, rank, events, &mut applied);
                applied
            })
        })?;
        applied.map(ApplyResult).map_err(BadBatchError::new_err)
    }

    /// Apply a run of blocks by their hashes alone: engine hashes and chain hashes, u64 little-endian.
    #[pyo3(signature = (worker, rank, hashes, chain, parent=None, tier=0))]
    #[expect(clippy::too_many_arguments, reason = "the signature of the twin")]
    fn apply_hashes(
        &self,
        py: Python<'_>,
        worker: &str,
        rank: i64,
        hashes: &Bound<'_, PyAny>,
        chain: &Bound<'_, PyAny>,
        parent: Option<u64>,
        tier: i64,
    ) -> PyResult<ApplyResult> {
        let Some(tier) = u8::try_from(tier).ok().filter(|tier| *tier < 4) else {
            return Err(PyValueError::new_err(format!("{tier} is not a valid Tier")));
        };
        let (hashes, chain) = (u64s(py, hashes)?, u64s(py, chain)?);
        let (engines, owns) = (hashes.len(), chain.len());
        if engines != owns {
            return Err(HashesError::new_err(format!("{engines} engine hashes, but {owns} chain hashes")));
        }
        let given = Given { hashes: &hashes, chain: &chain, parent, tier };
        let mut applied = Applied::default();
        if engines < DETACH_BLOCKS {
            self.shared.write().apply_given(worker, rank, &given, &mut applied);
        } else {
            py.detach(|| self.shared.write().apply_given(worker, rank, &given, &mut applied));
        }
        Ok(ApplyResult(applied))
    }

    /// Forget every block of the rank, in all tiers and groups. The rank stays.
    fn clear_rank(&self, py: Python<'_>, worker: &str, rank: i64) {
        py.detach(|| self.shared.write().clear_rank(worker, rank));
    }

    /// Forget the worker and its ranks. Unknown: no-op.
    fn remove_worker(&self, py: Python<'_>, worker: &str) {
        py.detach(|| self.shared.write().remove_worker(worker));
    }

    /// Every rank that holds a prefix of `chain` (u64 little-endian), in no particular order.
    #[pyo3(name = "match")]
    fn find(&self, py: Python<'_>, chain: &Bound<'_, PyAny>) -> PyResult<Matches> {
        if let Ok(chain) = chain.cast::<PyBytes>()
            && chain.as_bytes().len() <= KEEP_BYTES
            && let Ok(index) = self.shared.0.try_read()
        {
            return Ok(Matches::new(index.owners.clone(), index.matches(chain.as_bytes())));
        }
        with_bytes(py, chain, 0, |chain| {
            let index = self.shared.read();
            Matches::new(index.owners.clone(), index.matches(chain))
        })
    }

    /// From now on keep the engine hashes of so many blocks.
    fn keep_links(&self, limit: i64) {
        self.shared.write().masks.keep_links(usize::try_from(limit).unwrap_or(0));
    }

    /// Engine hash of every block of `chain`, as last told; 0 where it is not known. Both u64 little-endian.
    fn engine_hashes<'py>(&self, py: Python<'py>, chain: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
        let mut hashes = u64s(py, chain)?;
        {
            let index = self.shared.read();
            let links = index.masks.links.as_ref();
            for own in &mut hashes {
                *own = links.map_or(0, |links| links.engine(*own));
            }
        }
        let packed: Vec<u8> = hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect();
        Ok(PyBytes::new(py, &packed))
    }

    /// Chain hash of every block that the rank knows by these engine hashes, u64 little-endian; 0 where it knows none.
    fn own_hashes<'py>(&self, py: Python<'py>, worker: &str, rank: i64, hashes: Vec<u64>) -> Bound<'py, PyBytes> {
        let packed: Vec<u8> = {
            let index = self.shared.read();
            let groups = index.rank(worker, rank).map_or(&[][..], |rank| &rank.groups);
            let own = |engine: u64| {
                let known =
                    |(_, group): &(i128, Residency)| group.blocks.get(engine).and_then(|block| group.blocks.own(block));
                groups.iter().find_map(known).unwrap_or(0)
            };
            hashes.into_iter().flat_map(|engine| own(engine).to_le_bytes()).collect()
        };
        PyBytes::new(py, &packed)
    }

    /// Every (worker, rank) that was applied to, loaded or cleared, and not removed.
    fn ranks(&self) -> Vec<(String, i64)> {
        self.shared.read().ranks().iter().map(|rank| (rank.key.worker.clone(), rank.key.rank)).collect()
    }

    /// Blocks that the rank holds, any tier (of several groups, the fullest).
    fn resident(&self, worker: &str, rank: i64) -> usize {
        self.shared.read().resident(worker, rank)
    }

    /// Tokens per block as learned from the rank's events.
    fn block_size(&self, worker: &str, rank: i64) -> Option<u64> {
        self.shared.read().rank(worker, rank).and_then(Rank::block_size)
    }

    /// Counts for metrics.
    fn stats(&self) -> IndexStats {
        IndexStats(self.shared.read().stats())
    }

    /// Bytes that its blocks, tables and sets take.
    fn memory_bytes(&self) -> usize {
        self.shared.read().bytes()
    }

    /// Everything that can match: per (worker, rank) and chain hash its (group, tier, copies).
    fn content<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let ranks = self.content_of_ranks();
        let content = PyDict::new(py);
        for (key, mut blocks) in ranks {
            blocks.sort_unstable();
            blocks.dedup();
            let of_rank = PyDict::new(py);
            for places in blocks.chunk_by(|one, other| one.0 == other.0) {
                let copies = places.iter().map(|(_, group, tier, copies)| (*group, *tier, *copies));
                of_rank.set_item(places[0].0, PyTuple::new(py, copies.collect::<Vec<_>>())?)?;
            }
            content.set_item(key, of_rank)?;
        }
        Ok(content)
    }

    // Snapshots

    /// The whole index, or one worker's part.
    #[pyo3(signature = (worker=None))]
    fn dump<'py>(&self, py: Python<'py>, worker: Option<String>) -> PyResult<Bound<'py, PyBytes>> {
        let mut steps = self.dump_steps(worker);
        let data = py.detach(|| steps.at_once())?;
        Ok(PyBytes::new(py, &data))
    }

    /// As `dump`, a few milliseconds a step. What is dumped must not change before the last one.
    #[pyo3(signature = (worker=None))]
    fn dump_steps(&self, worker: Option<String>) -> DumpSteps {
        DumpSteps::new(self.shared.clone(), worker)
    }

    /// Replace the ranks that `data` holds (of those in `ranks`, if given). Raises `BadDumpError`, with nothing changed.
    #[pyo3(signature = (data, ranks=None))]
    fn load(&self, py: Python<'_>, data: &Bound<'_, PyAny>, ranks: Option<Py<PyAny>>) -> PyResult<Vec<(String, i64)>> {
        let prepared = Py::new(py, self.prepare(py, data, ranks)?.at_once(py)?)?;
        let all = PyList::new(py, prepared.get().keys())?;
        let loaded = self.adopt(py, prepared.bind(py), all.as_any())?;
        let mut steps = self.discard(prepared);
        while !steps.step() {}
        Ok(loaded)
    }

    /// `load` in three parts: this builds the ranks aside; then `adopt`; and always `discard`.
    #[pyo3(signature = (data, ranks=None))]
    fn prepare(&self, py: Python<'_>, data: &Bound<'_, PyAny>, ranks: Option<Py<PyAny>>) -> PyResult<PrepareSteps> {
        let data = match data.cast::<PyBytes>() {
            Ok(data) => data.clone(),
            Err(_) => with_bytes(py, data, usize::MAX, <[u8]>::to_vec).map(|data| PyBytes::new(py, &data))?,
        };
        Ok(PrepareSteps::new(self.shared.clone(), data.unbind(), ranks))
    }

    /// Replace those of `ranks` that were prepared, at once; which were replaced.
    fn adopt(
        &self,
        py: Python<'_>,
        prepared: &Bound<'_, PreparedRanks>,
        ranks: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<(String, i64)>> {
        let mut adopted = Vec::new();
        for key in prepared.get().keys() {
            if ranks.contains(&key)? {
                adopted.push(key);
            }
        }
        let prepared = prepared.get();
        py.detach(|| {
            prepared.with(|prepared| {
                let mut index = self.shared.write();
                for (worker, rank) in &adopted {
                    let same = |other: &Rank| other.key.worker == *worker && other.key.rank == *rank;
                    let Some(at) = prepared.iter().position(same) else { continue };
                    let old = index.adopt(prepared.remove(at));
                    prepared.extend(old);
                }
                index.evict_surplus();
            });
        });
        Ok(adopted)
    }

    /// Give back what was not adopted, and what was replaced.
    fn discard(&self, prepared: Py<PreparedRanks>) -> DiscardSteps {
        DiscardSteps::new(self.shared.clone(), prepared)
    }
}

/// Chain hash, group, tier, copies.
type Place = (u64, i128, usize, u64);

impl PrefixIndex {
    fn content_of_ranks(&self) -> Vec<((String, i64), Vec<Place>)> {
        let index = self.shared.read();
        let mut ranks = Vec::new();
        for rank in index.ranks() {
            let mut places = Vec::new();
            for (number, group) in &rank.groups {
                let blocks = &group.blocks;
                for block in (0..blocks.end()).filter(|block| blocks.is_block(*block)) {
                    let Some(own) = blocks.own(block) else { continue };
                    let copies = blocks.copies(block);
                    let tiers = (0..4).map(|tier| (own, *number, tier, copies_in(copies, tier)));
                    places.extend(tiers.filter(|(.., copies)| *copies > 0));
                }
            }
            ranks.push(((rank.key.worker.clone(), rank.key.rank), places));
        }
        ranks
    }
}
