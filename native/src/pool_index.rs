//! `PoolIndex` for Python, and the page hashes.
//!
//! The index stands behind a lock, under which nobody makes Python objects or waits for the GIL. Dumps and differences work
//! on pictures, so that they hold it for an instant only.

use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use pyo3::exceptions::{PyStopIteration, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict, PyFrozenSet, PyString, PyTuple, PyType};

use crate::arguments::{DETACH_BYTES, text_bytes, with_bytes};
use crate::pool::copies::{Difference, Dumper};
use crate::pool::events::Reason;
use crate::pool::format::{DELTA, DUMP, File, read};
use crate::pool::index::{Applied, Applying, Limits, PoolIndex as Index};
use crate::pool::keys;
use crate::pool::matching::{Layout, MAX_TRAILING};
use crate::pool::page_hash;
use crate::{BadBatchError, BadDumpError, BlockSizeError, TokensError};

const TENANTS_SHOWN: usize = 16;
const LAYOUTS: usize = 64;
/// Hashing so many bytes is worth releasing the GIL.
const DETACH_HASHED: usize = 64 * 1024;

struct Shared(RwLock<Index>);

impl Shared {
    fn read(&self) -> RwLockReadGuard<'_, Index> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Index> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Presence of every page of a pool: see `kvcore.pool_index`.
#[pyclass(frozen, module = "tidegate_kvcore")]
pub struct PoolIndex {
    shared: Arc<Shared>,
    #[pyo3(get)]
    limits: Py<PyAny>,
    /// Layouts that were asked for, each with the object that it was made from, which keeps its address.
    layouts: Mutex<Vec<(Py<PyAny>, Arc<Layout>)>>,
}

/// A class of the twin, which has the results of both.
fn class<'py>(py: Python<'py>, cell: &PyOnceLock<Py<PyType>>, name: &str) -> PyResult<Bound<'py, PyType>> {
    cell.import(py, "kvcore.pool_index", name).cloned()
}

fn rejected<'py>(py: Python<'py>, counts: &[usize]) -> PyResult<Bound<'py, PyDict>> {
    let rejected = PyDict::new(py);
    for (reason, count) in Reason::ALL.iter().zip(counts).filter(|(_, count)| **count > 0) {
        rejected.set_item(reason.name(), count)?;
    }
    Ok(rejected)
}

fn result(py: Python<'_>, applied: Applied) -> PyResult<Bound<'_, PyAny>> {
    static APPLIED: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    static COUNTER: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let Applied { stored, removed, unchanged, cleared, unparsed, unknown_media, evicted, rejected: counts } = applied;
    let applied = class(py, &APPLIED, "PoolApplied")?;
    if counts.iter().all(|count| *count == 0) {
        return applied.call1((stored, removed, unchanged, cleared, unparsed, unknown_media, evicted));
    }
    let rejected = COUNTER.import(py, "collections", "Counter")?.call1((rejected(py, &counts)?,))?;
    applied.call1((stored, removed, unchanged, cleared, unparsed, unknown_media, evicted, rejected))
}

fn bound(limits: &Bound<'_, PyAny>, name: &str) -> PyResult<usize> {
    let value: i128 = limits.getattr(name)?.extract()?;
    Ok(usize::try_from(value.max(0)).unwrap_or(usize::MAX))
}

/// A layout from the attributes of a `kvcore.pool_layout.PoolLayout`.
fn read_layout(layout: &Bound<'_, PyAny>) -> PyResult<Layout> {
    let mut every = Vec::new();
    let mut trailing: Vec<(usize, Vec<String>)> = Vec::new();
    for part in layout.getattr("sets")?.try_iter()? {
        let part = part?;
        let components: Vec<String> = part.getattr("components")?.extract()?;
        if part.getattr("hit_policy")?.extract::<String>()? != "trailing_pages" {
            every.extend(components);
            continue;
        }
        let pages = bound(&part, "trailing_pages")?;
        match trailing.iter_mut().find(|(other, _)| *other == pages) {
            Some((_, all)) => all.extend(components),
            None => trailing.push((pages, components)),
        }
    }
    if trailing.len() > MAX_TRAILING {
        return Err(PyValueError::new_err(format!("{} different trailing_pages in one layout", trailing.len())));
    }
    let scheme: String = layout.getattr("scheme")?.extract()?;
    Ok(Layout::new(&scheme, layout.getattr("key_prefix")?.extract()?, every, trailing))
}

impl PoolIndex {
    fn layout(&self, object: &Bound<'_, PyAny>) -> PyResult<Arc<Layout>> {
        let lock = || self.layouts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, layout)) = lock().iter().find(|(other, _)| other.is(object)) {
            return Ok(layout.clone());
        }
        let layout = Arc::new(read_layout(object)?);
        let mut layouts = lock();
        let old = if layouts.len() < LAYOUTS { Vec::new() } else { std::mem::take(&mut *layouts) };
        layouts.push((object.clone().unbind(), layout.clone()));
        drop(layouts);
        drop(old);
        Ok(layout)
    }
}

#[pymethods]
impl PoolIndex {
    #[new]
    #[pyo3(signature = (limits=None))]
    fn new(py: Python<'_>, limits: Option<Bound<'_, PyAny>>) -> PyResult<Self> {
        let limits = match limits {
            Some(limits) => limits,
            None => py.import("kvcore.pool_index")?.getattr("PoolLimits")?.call0()?,
        };
        let index = Index::new(Limits {
            pages: bound(&limits, "max_pages")?,
            prefixes: bound(&limits, "max_prefixes")?,
            components: bound(&limits, "max_components")?,
            key_bytes: bound(&limits, "max_key_bytes")?,
        });
        let shared = Arc::new(Shared(RwLock::new(index)));
        Ok(Self { shared, limits: limits.unbind(), layouts: Mutex::default() })
    }

    // Writing

    /// Apply one message of a master, its events in order. Raises `BadBatchError`, with nothing changed.
    fn apply_payload<'py>(&self, py: Python<'py>, payload: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let applied = with_bytes(py, payload, DETACH_BYTES, |payload| self.shared.write().apply_payload(payload))?;
        result(py, applied.map_err(BadBatchError::new_err)?)
    }

    /// Take in a key list, one a line.
    #[pyo3(signature = (keys, *, known=None))]
    fn add_keys<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        known: Option<&Bound<'py, Self>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let known = known.map(|known| known.get().shared.clone()).filter(|known| !Arc::ptr_eq(known, &self.shared));
        let applied = with_bytes(py, keys, DETACH_BYTES, |keys| {
            let known = known.as_ref().map(|known| known.read());
            self.shared.write().add_keys(keys, known.as_deref())
        })?;
        result(py, applied)
    }

    /// Apply what `difference` gave. Raises `BadBatchError`, with nothing changed.
    fn apply_delta<'py>(&self, py: Python<'py>, delta: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let applied: Result<_, String> = with_bytes(py, delta, DETACH_BYTES, |delta| {
            let file = read(DELTA, delta)?;
            file.parts.iter().try_for_each(|part| part.check_pages(delta))?;
            Ok(self.shared.write().apply_delta(delta, &file))
        })?;
        let refused = |why| BadBatchError::new_err(format!("not a delta of a pool: {why}"));
        result(py, applied.map_err(refused)?)
    }

    /// Forget everything, or all of one tenant.
    #[pyo3(signature = (tenant=None))]
    fn clear(&self, py: Python<'_>, tenant: Option<&str>) {
        py.detach(|| self.shared.write().clear(tenant));
    }

    // Reading

    /// Half-open ranges of positions in `pages` that can be loaded from the pool, ascending.
    #[pyo3(name = "match", signature = (layout, pages, *, tenant="default"))]
    fn find<'py>(
        &self,
        py: Python<'py>,
        layout: &Bound<'py, PyAny>,
        pages: &Bound<'py, PyAny>,
        tenant: &str,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let layout = self.layout(layout)?;
        let found = if let Ok(pages) = pages.cast::<PyBytes>()
            && let Ok(index) = self.shared.0.try_read()
        {
            index.find(tenant, &layout, pages.as_bytes().as_chunks().0)
        } else {
            with_bytes(py, pages, 0, |pages| self.shared.read().find(tenant, &layout, pages.as_chunks().0))?
        };
        PyTuple::new(py, found.into_iter().map(|range| (range.start, range.end)))
    }

    /// Media that hold the object.
    #[pyo3(signature = (object_key, *, tenant="default"))]
    fn present<'py>(
        &self,
        py: Python<'py>,
        object_key: &Bound<'py, PyString>,
        tenant: &str,
    ) -> PyResult<Bound<'py, PyFrozenSet>> {
        let media: Vec<String> = match object_key.to_str() {
            Ok(key) => self.shared.read().present(tenant, key).into_iter().map(str::to_owned).collect(),
            Err(_) => Vec::new(), // a lone surrogate
        };
        PyFrozenSet::new(py, media)
    }

    /// Every deployment, the one touched longest ago first.
    fn prefixes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        static PREFIX: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        let prefix = class(py, &PREFIX, "PoolPrefix")?;
        let rows: Vec<_> = {
            let index = self.shared.read();
            let spaces = index.spaces();
            let row = |space: &crate::pool::Space| {
                let identity = space.identity.clone();
                let (pages, matched) = (space.pages.len(), space.matched.load(std::sync::atomic::Ordering::Relaxed));
                (identity, pages, space.objects, space.arrived, matched)
            };
            spaces.into_iter().map(row).collect()
        };
        let prefixes = rows.into_iter().map(|(identity, pages, objects, arrived, matched)| {
            let (tenant, scheme, key_prefix) = (&*identity.tenant, identity.scheme.name(), &*identity.prefix);
            prefix.call1((tenant, scheme, key_prefix, pages, objects, arrived, matched))
        });
        PyTuple::new(py, prefixes.collect::<PyResult<Vec<_>>>()?)
    }

    /// Sizes and counters.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        static STATS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        let stats = class(py, &STATS, "PoolStats")?;
        let (sizes, total, mut tenants, backend_id) = {
            let index = self.shared.read();
            let spaces = index.spaces();
            let tenants: Vec<String> = spaces.iter().map(|space| space.identity.tenant.to_string()).collect();
            let objects: usize = spaces.iter().map(|space| space.objects).sum();
            let is_matched =
                |space: &&&crate::pool::Space| space.matched.load(std::sync::atomic::Ordering::Relaxed) > 0;
            let matched: usize = spaces.iter().filter(is_matched).map(|space| space.objects).sum();
            let sizes = [
                ("pages", index.page_count()),
                ("objects", objects),
                ("prefixes", spaces.len()),
                ("components", index.component_count()),
                ("unmatched", objects - matched),
                ("memory_bytes", index.bytes()),
            ];
            (sizes, index.total, tenants, index.backend_id.clone())
        };
        tenants.sort_unstable();
        tenants.dedup();
        tenants.truncate(TENANTS_SHOWN);
        let fields = PyDict::new(py);
        for (name, value) in sizes {
            fields.set_item(name, value)?;
        }
        fields.set_item("unparsed", total.unparsed)?;
        fields.set_item("unknown_media", total.unknown_media)?;
        fields.set_item("evicted", total.evicted)?;
        fields.set_item("rejected", rejected(py, &total.rejected)?)?;
        fields.set_item("tenants", PyTuple::new(py, tenants)?)?;
        fields.set_item("backend_id", backend_id)?;
        stats.call((), Some(&fields))
    }

    // Copies

    /// Deltas after which this index holds the same objects as `target`.
    #[pyo3(signature = (target, *, tenant=Some("default"), part_bytes=1_000_000))]
    fn difference<'py>(
        &self,
        py: Python<'py>,
        target: &Bound<'py, Self>,
        tenant: Option<&str>,
        part_bytes: usize,
    ) -> Vec<Bound<'py, PyBytes>> {
        let target = target.get().shared.clone();
        let deltas = py.detach(|| {
            let difference = Difference::new(&self.shared.read(), tenant.map(str::to_owned), part_bytes);
            difference.deltas(&target.read())
        });
        deltas.iter().map(|delta| PyBytes::new(py, delta)).collect()
    }

    /// Everything but the counters, as it is at the first step.
    fn dump(&self) -> PoolDumpSteps {
        PoolDumpSteps { shared: self.shared.clone(), dumper: None, over: false }
    }

    /// Hold what `dump` gave, from the last step on. Raises `BadDumpError`, with nothing changed.
    fn load(&self, py: Python<'_>, dump: &Bound<'_, PyAny>) -> PyResult<PoolLoadSteps> {
        let data = match dump.cast::<PyBytes>() {
            Ok(data) => data.clone(),
            Err(_) => with_bytes(py, dump, usize::MAX, <[u8]>::to_vec).map(|data| PyBytes::new(py, &data))?,
        };
        Ok(PoolLoadSteps { shared: self.shared.clone(), data: data.unbind(), aside: None, over: false })
    }
}

/// The bytes of a dump.
#[pyclass(module = "tidegate_kvcore")]
pub struct PoolDumpSteps {
    shared: Arc<Shared>,
    dumper: Option<Box<Dumper>>,
    over: bool,
}

#[pymethods]
impl PoolDumpSteps {
    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __next__(&mut self, py: Python<'_>) -> PyResult<()> {
        if self.over {
            return Err(PyStopIteration::new_err(()));
        }
        let shared = &self.shared;
        let dumper = self.dumper.get_or_insert_with(|| Box::new(Dumper::new(&shared.read())));
        let Some(data) = dumper.step() else { return Ok(()) };
        self.close();
        Err(PyStopIteration::new_err((PyBytes::new(py, &data).unbind(),)))
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
        (self.over, self.dumper) = (true, None);
    }
}

/// A dump that is being loaded.
#[pyclass(module = "tidegate_kvcore")]
pub struct PoolLoadSteps {
    shared: Arc<Shared>,
    data: Py<PyBytes>,
    aside: Option<Box<Aside>>,
    over: bool,
}

/// The index that is built.
struct Aside {
    file: File,
    index: Index,
    applied: Applied,
    /// Parts that were begun.
    begun: usize,
    applying: Option<Applying>,
}

impl Aside {
    /// Some pages more; whether it is complete.
    fn step(&mut self, data: &[u8]) -> Result<bool, String> {
        if let Some(applying) = &mut self.applying {
            if applying.step(data, &mut self.index, &mut self.applied)? {
                self.applying = None;
            }
            return Ok(false);
        }
        let Some(part) = self.file.parts.get(self.begun) else {
            self.index.loaded(self.applied);
            return Ok(true);
        };
        self.begun += 1;
        self.applying = Some(self.index.begin(&self.file, part, true));
        Ok(false)
    }
}

#[pymethods]
impl PoolLoadSteps {
    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __next__(&mut self, py: Python<'_>) -> PyResult<()> {
        if self.over {
            return Err(PyStopIteration::new_err(()));
        }
        let data = self.data.as_bytes(py);
        let refused = |why| BadDumpError::new_err(format!("not a dump of a pool: {why}"));
        let Some(aside) = &mut self.aside else {
            let file = read(DUMP, data).map_err(refused);
            self.over = file.is_err();
            let index = Index::new(self.shared.read().limits);
            let applied = Applied::default();
            self.aside = Some(Box::new(Aside { file: file?, index, applied, begun: 0, applying: None }));
            return Ok(());
        };
        match aside.step(data) {
            Ok(false) => Ok(()),
            Ok(true) => {
                self.over = true;
                if let Some(aside) = self.aside.take() {
                    let shared = self.shared.clone();
                    py.detach(|| shared.write().replace(aside.index));
                }
                Err(PyStopIteration::new_err(()))
            }
            Err(why) => {
                self.close();
                Err(refused(why))
            }
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
        (self.over, self.aside) = (true, None);
    }
}

/// Identity of every full page of `tokens`, 16 bytes each, back to back.
#[pyfunction]
#[pyo3(signature = (tokens, page_size, *, adapter=None, salt=None, pairs=false))]
pub fn page_hashes<'py>(
    py: Python<'py>,
    tokens: &Bound<'py, PyAny>,
    page_size: i64,
    adapter: Option<&Bound<'py, PyString>>,
    salt: Option<&Bound<'py, PyString>>,
    pairs: bool,
) -> PyResult<Bound<'py, PyBytes>> {
    let Some(size) = usize::try_from(page_size).ok().filter(|size| *size > 0) else {
        return Err(BlockSizeError::new_err(page_size));
    };
    let seed = page_hash::seed_of(&text_bytes(adapter)?, &text_bytes(salt)?);
    let hashes = with_bytes(py, tokens, DETACH_HASHED, |tokens| match tokens.len() % crate::hashing::TOKEN_BYTES {
        0 => Ok(page_hash::page_hashes(tokens, size, seed, pairs)),
        _ => Err(TokensError::new_err(format!("{} bytes are not whole u32 token ids", tokens.len()))),
    })??;
    Ok(PyBytes::new(py, &hashes))
}

/// What an object key names.
#[pyfunction]
#[pyo3(signature = (object_key, max_bytes=4096))]
pub fn parse_key<'py>(
    py: Python<'py>,
    object_key: &Bound<'py, PyAny>,
    max_bytes: usize,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    static KEY: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let parsed = if let Ok(text) = object_key.cast::<PyString>() {
        text.to_str().ok().and_then(|text| keys::parse(text, max_bytes))
    } else {
        let bytes: &[u8] = object_key.cast::<PyBytes>()?.as_bytes();
        std::str::from_utf8(bytes).ok().and_then(|text| keys::parse(text, max_bytes))
    };
    let Some(keys::Key { scheme, prefix, page, component }) = parsed else { return Ok(None) };
    let class = KEY.import(py, "kvcore.pool_keys", "PoolKey")?;
    let page = PyBytes::new(py, &page);
    class.call1((scheme.name(), prefix, page, component.concat())).map(Some)
}
