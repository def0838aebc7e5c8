//! Long work on an index in steps of a few milliseconds: iterators that are used like the generators of the twin.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::{PyRuntimeError, PyStopIteration};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::BadDumpError;
use crate::index::dump::{
    Dumper, GroupDump, Loader, RankDump, read_dump, write_end, write_other_kinds, write_rank, write_start,
};
use crate::index::{Blocks, Index, Rank, RankKey, unmark};
use crate::prefix_index::Shared;

const CLEARED_AT_ONCE: u32 = 8192;

/// Ranks of an index that it does not answer for (yet, or any more).
#[pyclass(frozen, module = "tidegate_kvcore")]
pub struct PreparedRanks {
    shared: Arc<Shared>,
    ranks: Mutex<Vec<Rank>>,
}

impl PreparedRanks {
    pub fn with<T>(&self, work: impl FnOnce(&mut Vec<Rank>) -> T) -> T {
        work(&mut self.ranks.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn keys(&self) -> Vec<(String, i64)> {
        self.with(|ranks| ranks.iter().map(|rank| (rank.key.worker.clone(), rank.key.rank)).collect())
    }
}

#[pymethods]
impl PreparedRanks {
    /// Who they are; the values mean nothing.
    #[getter]
    fn ranks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let ranks = PyDict::new(py);
        self.keys().into_iter().try_for_each(|key| ranks.set_item(key, py.None()))?;
        Ok(ranks)
    }
}

impl Drop for PreparedRanks {
    fn drop(&mut self) {
        let ranks = std::mem::take(self.ranks.get_mut().unwrap_or_else(PoisonError::into_inner));
        discard_at_once(&self.shared, ranks);
    }
}

fn discard_at_once(shared: &Shared, ranks: Vec<Rank>) {
    if ranks.is_empty() {
        return;
    }
    let mut index = shared.write();
    for mut rank in ranks {
        while !rank.groups.is_empty() {
            index.drop_group(&mut rank, 0);
        }
    }
    index.masks.shrink();
}

/// Ranks built aside from a dump.
#[pyclass(module = "tidegate_kvcore")]
pub struct PrepareSteps {
    shared: Arc<Shared>,
    state: Prepare,
}

enum Prepare {
    New { data: Py<PyBytes>, only: Option<Py<PyAny>> },
    Running(Box<Running>),
    Over,
}

struct Running {
    data: Py<PyBytes>,
    todo: std::vec::IntoIter<RankDump>,
    /// Of the last rank, the groups to come, and the one that is being loaded.
    groups: std::vec::IntoIter<(i128, GroupDump)>,
    loader: Option<Loader>,
    ranks: Vec<Rank>,
}

impl PrepareSteps {
    pub fn new(shared: Arc<Shared>, data: Py<PyBytes>, only: Option<Py<PyAny>>) -> Self {
        Self { shared, state: Prepare::New { data, only } }
    }

    /// Run to the end.
    pub fn at_once(&mut self, py: Python<'_>) -> PyResult<PreparedRanks> {
        loop {
            if let Some(prepared) = self.step(py)? {
                return Ok(prepared);
            }
        }
    }

    fn step(&mut self, py: Python<'_>) -> PyResult<Option<PreparedRanks>> {
        match std::mem::replace(&mut self.state, Prepare::Over) {
            Prepare::Over => Err(PyStopIteration::new_err(())),
            Prepare::New { data, only } => {
                let mut dumps = read_dump(data.as_bytes(py)).map_err(BadDumpError::new_err)?;
                if let Some(only) = only {
                    let only = only.into_bound(py);
                    let mut kept = Vec::with_capacity(dumps.len());
                    for dump in dumps {
                        if only.contains((&dump.worker, dump.rank))? {
                            kept.push(dump);
                        }
                    }
                    dumps = kept;
                }
                let groups = Vec::new().into_iter();
                let running = Running { data, todo: dumps.into_iter(), groups, loader: None, ranks: Vec::new() };
                self.run(py, Box::new(running))
            }
            Prepare::Running(running) => self.run(py, running),
        }
    }

    fn run(&mut self, py: Python<'_>, mut running: Box<Running>) -> PyResult<Option<PreparedRanks>> {
        let done = running.step(py, &self.shared);
        match done {
            Ok(false) => {
                self.state = Prepare::Running(running);
                Ok(None)
            }
            Ok(true) => Ok(Some(PreparedRanks { shared: self.shared.clone(), ranks: Mutex::new(running.ranks) })),
            Err(refused) => {
                discard_at_once(&self.shared, running.ranks);
                Err(BadDumpError::new_err(refused))
            }
        }
    }
}

impl Running {
    fn step(&mut self, py: Python<'_>, shared: &Shared) -> Result<bool, String> {
        let data = self.data.as_bytes(py);
        let mut index = shared.write();
        loop {
            if let (Some(loader), Some(rank)) = (&mut self.loader, self.ranks.last_mut()) {
                let Some((_, group)) = rank.groups.last_mut() else { return Ok(true) };
                if loader.step(data, group, &mut index.masks)? {
                    self.loader = None;
                }
                return Ok(false);
            }
            if let (Some((number, dump)), Some(rank)) = (self.groups.next(), self.ranks.last_mut()) {
                let group = index.add_group_aside(rank, number).ok_or("too many groups")?;
                self.loader = Some(Loader::new(dump, group));
                continue;
            }
            let Some(dump) = self.todo.next() else { return Ok(true) };
            let mut rank = Rank::new(RankKey::new(&dump.worker, dump.rank));
            rank.other_kinds = dump.other_kinds;
            self.groups = dump.groups.into_iter();
            self.ranks.push(rank);
        }
    }
}

#[pymethods]
impl PrepareSteps {
    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __next__(&mut self, py: Python<'_>) -> PyResult<()> {
        match self.step(py)? {
            None => Ok(()),
            Some(prepared) => Err(PyStopIteration::new_err((Py::new(py, prepared)?,))),
        }
    }

    fn send(&mut self, py: Python<'_>, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let _ = value;
        self.__next__(py)
    }

    fn throw(&mut self, error: Bound<'_, PyAny>) -> PyResult<()> {
        self.close();
        Err(PyErr::from_value(error))
    }

    /// Give up: what was built goes.
    fn close(&mut self) {
        if let Prepare::Running(running) = std::mem::replace(&mut self.state, Prepare::Over) {
            discard_at_once(&self.shared, running.ranks);
        }
    }
}

impl Drop for PrepareSteps {
    fn drop(&mut self) {
        self.close();
    }
}

/// A rank that is being taken apart: its blocks with their places in the masks, and how far the last of them got.
struct Ending {
    rank: Rank,
    blocks: Vec<(Blocks, u32)>,
    at: u32,
}

/// What was not adopted, and what was replaced, given back.
#[pyclass(module = "tidegate_kvcore")]
pub struct DiscardSteps {
    shared: Arc<Shared>,
    prepared: Py<PreparedRanks>,
    rank: Option<Ending>,
    over: bool,
}

impl DiscardSteps {
    pub fn new(shared: Arc<Shared>, prepared: Py<PreparedRanks>) -> Self {
        Self { shared, prepared, rank: None, over: false }
    }

    /// A step; whether it was the last.
    pub fn step(&mut self) -> bool {
        if self.rank.is_none() {
            let rank = self.prepared.get().with(|ranks| if ranks.is_empty() { None } else { Some(ranks.remove(0)) });
            self.rank = rank.map(|mut rank| {
                let blocks = rank.groups.iter_mut().map(|(_, group)| (group.take(), group.place)).collect();
                Ending { rank, blocks, at: 0 }
            });
        }
        let mut index = self.shared.write();
        let Some(Ending { rank, blocks, at }) = &mut self.rank else {
            index.masks.shrink();
            self.over = true;
            return true;
        };
        if let Some((last, place)) = blocks.last() {
            let stop = last.end().min(*at + CLEARED_AT_ONCE);
            unmark(last, *place, &mut index.masks, *at, stop);
            *at = stop;
            if stop == last.end() {
                blocks.pop();
                *at = 0;
            }
        }
        if blocks.is_empty() {
            while !rank.groups.is_empty() {
                index.drop_group(rank, 0);
            }
            self.rank = None;
        }
        false
    }
}

#[pymethods]
impl DiscardSteps {
    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __next__(&mut self) -> PyResult<()> {
        if self.over || self.step() { Err(PyStopIteration::new_err(())) } else { Ok(()) }
    }

    fn send(&mut self, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let _ = value;
        self.__next__()
    }

    fn throw(&mut self, error: Bound<'_, PyAny>) -> PyResult<()> {
        self.close();
        Err(PyErr::from_value(error))
    }

    /// Do the rest at once.
    fn close(&mut self) {
        while self.rank.is_some() {
            self.step();
        }
        self.over = true;
    }
}

impl Drop for DiscardSteps {
    fn drop(&mut self) {
        self.close();
    }
}

/// The bytes of a dump.
#[pyclass(module = "tidegate_kvcore")]
pub struct DumpSteps {
    shared: Arc<Shared>,
    worker: Option<String>,
    state: Option<Dump>,
    over: bool,
}

struct Dump {
    out: Vec<u8>,
    todo: std::vec::IntoIter<(Arc<RankKey>, u64)>,
    rank: Option<(Arc<RankKey>, u64)>,
    group: usize,
    dumper: Option<Dumper>,
}

impl DumpSteps {
    pub fn new(shared: Arc<Shared>, worker: Option<String>) -> Self {
        Self { shared, worker, state: None, over: false }
    }

    /// A step; the bytes after the last.
    fn step(&mut self) -> PyResult<Option<Vec<u8>>> {
        let shared = self.shared.clone();
        let index = shared.read();
        self.step_in(&index)
    }

    /// All steps, the index as it is.
    pub fn at_once(&mut self) -> PyResult<Vec<u8>> {
        let shared = self.shared.clone();
        let index = shared.read();
        loop {
            if let Some(data) = self.step_in(&index)? {
                return Ok(data);
            }
        }
    }

    fn step_in(&mut self, index: &Index) -> PyResult<Option<Vec<u8>>> {
        let dump = self.state.get_or_insert_with(|| {
            let wanted = |rank: &&Rank| self.worker.as_ref().is_none_or(|worker| *worker == rank.key.worker);
            let keys: Vec<_> =
                index.ranks().iter().filter(wanted).map(|rank| (rank.key.clone(), rank.version)).collect();
            let mut out = Vec::new();
            write_start(&mut out, keys.len());
            Dump { out, todo: keys.into_iter(), rank: None, group: 0, dumper: None }
        });
        match dump.step(index) {
            Ok(false) => Ok(None),
            Ok(true) => {
                self.over = true;
                Ok(self.state.take().map(|dump| dump.out))
            }
            Err(changed) => {
                (self.over, self.state) = (true, None);
                Err(PyRuntimeError::new_err(changed))
            }
        }
    }
}

impl Dump {
    fn step(&mut self, index: &Index) -> Result<bool, String> {
        loop {
            let Some((key, version)) = &self.rank else {
                let Some(next) = self.todo.next() else {
                    write_end(&mut self.out);
                    return Ok(true);
                };
                let rank = unchanged(index, &next.0, next.1)?;
                write_rank(&mut self.out, rank);
                (self.rank, self.group) = (Some(next), 0);
                continue;
            };
            let rank = unchanged(index, key, *version)?;
            let Some((number, group)) = rank.groups.get(self.group) else {
                write_other_kinds(&mut self.out, rank);
                self.rank = None;
                continue;
            };
            let dumper = self.dumper.get_or_insert_default();
            if dumper.step(group) {
                std::mem::take(dumper).write(*number, group, &mut self.out);
                self.dumper = None;
                self.group += 1;
            }
            return Ok(false);
        }
    }
}

fn unchanged<'i>(index: &'i Index, key: &RankKey, version: u64) -> Result<&'i Rank, String> {
    let rank = index.rank(&key.worker, key.rank).filter(|rank| rank.version == version);
    rank.ok_or_else(|| format!("rank {} of {} changed while it was dumped", key.rank, key.worker))
}

#[pymethods]
impl DumpSteps {
    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __next__(&mut self, py: Python<'_>) -> PyResult<()> {
        if self.over {
            return Err(PyStopIteration::new_err(()));
        }
        match self.step()? {
            None => Ok(()),
            Some(data) => Err(PyStopIteration::new_err((PyBytes::new(py, &data).unbind(),))),
        }
    }

    fn send(&mut self, py: Python<'_>, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let _ = value;
        self.__next__(py)
    }

    fn throw(&mut self, error: Bound<'_, PyAny>) -> PyResult<()> {
        self.close();
        Err(PyErr::from_value(error))
    }

    fn close(&mut self) {
        (self.over, self.state) = (true, None);
    }
}
