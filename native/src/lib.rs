//! Native twin of `kvcore`: the same results from the same arguments, an order of magnitude faster.
//!
//! The modules `hashing`, `msgpack`, `media`, `values`, `extra_keys`, `found` and `events` know nothing of Python; `arguments` and `batches` lead to it.

mod arguments;
mod batches;
mod converting;
mod events;
mod extra_keys;
mod found;
mod hashing;
mod index;
mod media;
mod msgpack;
mod pool;
mod pool_index;
mod prefix_index;
mod results;
mod steps;
mod values;

use pyo3::import_exception;
use pyo3::prelude::*;

import_exception!(kvcore.errors, BadBatchError);
import_exception!(kvcore.errors, BadDumpError);
import_exception!(kvcore.errors, BlockSizeError);
import_exception!(kvcore.errors, HashesError);
import_exception!(kvcore.errors, TokensError);

#[pymodule]
mod _native {
    use pyo3::prelude::*;
    use pyo3::types::{PyBytes, PyString, PyTuple};

    use super::arguments::{DETACH_BYTES, multimodal, text_bytes, with_bytes};
    #[pymodule_export]
    use super::batches::{Batch, Cleared, Removed, Stored, decode_batch};
    #[pymodule_export]
    use super::pool_index::{PoolDumpSteps, PoolIndex, PoolLoadSteps, page_hashes, parse_key};
    #[pymodule_export]
    use super::prefix_index::PrefixIndex;
    #[pymodule_export]
    use super::results::{ApplyResult, IndexStats, Matches, RankMatch};
    #[pymodule_export]
    use super::steps::PreparedRanks;
    use super::{BlockSizeError, TokensError, hashing};

    /// Seed of the local hashes in one namespace.
    #[pyfunction]
    #[pyo3(signature = (adapter=None, salt=None))]
    fn seed_of(adapter: Option<&Bound<'_, PyString>>, salt: Option<&Bound<'_, PyString>>) -> PyResult<u64> {
        Ok(hashing::seed_of(&text_bytes(adapter)?, &text_bytes(salt)?))
    }

    /// u64 of a multimodal identifier.
    #[pyfunction]
    fn multimodal_hash(identifier: &Bound<'_, PyString>) -> PyResult<u64> {
        Ok(hashing::multimodal_hash(&text_bytes(Some(identifier))?))
    }

    /// Local hash of every full block of `tokens`.
    #[pyfunction]
    #[pyo3(signature = (tokens, block_size, *, seed=hashing::SEED, mm=None, eagle=false))]
    fn local_hashes(
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        block_size: i64,
        seed: u64,
        mm: Option<&Bound<'_, PyAny>>,
        eagle: bool,
    ) -> PyResult<Vec<u64>> {
        let mm = multimodal(mm)?;
        over_tokens(py, tokens, block_size, |tokens, block_size| {
            let mut local = Vec::with_capacity(hashing::block_count(tokens, block_size, eagle));
            hashing::local_hashes(tokens, block_size, seed, &mm, eagle, |hash| local.push(hash));
            local
        })
    }

    /// Chain hashes of every full block of `tokens`, u64 little-endian back to back.
    #[pyfunction]
    #[pyo3(signature = (tokens, block_size, *, adapter=None, salt=None, mm=None, parent=None, eagle=false))]
    #[expect(clippy::too_many_arguments, reason = "the signature of the twin")]
    fn chain_hashes<'py>(
        py: Python<'py>,
        tokens: &Bound<'py, PyAny>,
        block_size: i64,
        adapter: Option<&Bound<'py, PyString>>,
        salt: Option<&Bound<'py, PyString>>,
        mm: Option<&Bound<'py, PyAny>>,
        parent: Option<u64>,
        eagle: bool,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let seed = hashing::seed_of(&text_bytes(adapter)?, &text_bytes(salt)?);
        let mm = multimodal(mm)?;
        let chain = over_tokens(py, tokens, block_size, |tokens, block_size| {
            hashing::chain_hashes(tokens, block_size, seed, &mm, parent, eagle)
        })?;
        PyBytes::new_with(py, chain.len() * 8, |bytes| {
            for (place, hash) in bytes.chunks_exact_mut(8).zip(&chain) {
                place.copy_from_slice(&hash.to_le_bytes());
            }
            Ok(())
        })
    }

    /// Chain hashes for a trace row, the partial tail hashed like a block.
    #[pyfunction]
    fn sequence_hashes_with_tail<'py>(
        py: Python<'py>,
        tokens: &Bound<'py, PyAny>,
        block_size: i64,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let chain = over_tokens(py, tokens, block_size, hashing::sequence_hashes_with_tail)?;
        PyTuple::new(py, chain)
    }

    /// Run `work` on a token buffer and a block size, both checked.
    fn over_tokens<T: Send>(
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        block_size: i64,
        work: impl FnOnce(&[u8], usize) -> T + Send,
    ) -> PyResult<T> {
        let Some(size) = usize::try_from(block_size).ok().filter(|size| *size > 0) else {
            return Err(BlockSizeError::new_err(block_size));
        };
        with_bytes(py, tokens, DETACH_BYTES, |bytes| match bytes.len() % hashing::TOKEN_BYTES {
            0 => Ok(work(bytes, size)),
            _ => Err(TokensError::new_err(format!("{} bytes are not whole u32 token ids", bytes.len()))),
        })?
    }
}
