//! Page hashes of the shared pool: SHA-256 over the tokens of a page, chained to the page before it.
//!
//! The rules are those of the pure-Python twin, `kvcore/page_hash.py` (spec: pool-events §6 "Page hash").

use sha2::{Digest, Sha256};

use crate::hashing::TOKEN_BYTES;

/// Bytes of a page's digest that identify it in the index.
pub const PAGE_BYTES: usize = 16;
const DIGEST_BYTES: usize = 32;
const NAMESPACE: &[u8] = b"sglang-cache-namespace-v1";

/// What the first page is chained to, where a namespace is set.
pub fn seed_of(adapter: &[u8], salt: &[u8]) -> Option<[u8; DIGEST_BYTES]> {
    if adapter.is_empty() && salt.is_empty() {
        return None;
    }
    let mut hasher = Sha256::new_with_prefix(NAMESPACE);
    for part in [adapter, salt] {
        if part.is_empty() {
            hasher.update([0]);
        } else {
            hasher.update([1]);
            hasher.update((part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
    }
    Some(hasher.finalize().into())
}

/// How many full pages these tokens make; with `pairs` the last token is only the end of a pair.
pub fn page_count(tokens: &[u8], page_size: usize, pairs: bool) -> usize {
    (tokens.len() / TOKEN_BYTES).saturating_sub(usize::from(pairs)) / page_size
}

/// The first bytes of the digest of every full page, back to back.
pub fn page_hashes(tokens: &[u8], page_size: usize, seed: Option<[u8; DIGEST_BYTES]>, pairs: bool) -> Vec<u8> {
    let count = page_count(tokens, page_size, pairs);
    let mut hashes = Vec::with_capacity(count * PAGE_BYTES);
    let mut before = seed;
    let mut paired = Vec::new();
    for page in 0..count {
        let start = page * page_size * TOKEN_BYTES;
        let bytes = &tokens[start..start + page_size * TOKEN_BYTES];
        let mut digest = Sha256::new();
        if let Some(before) = before {
            digest.update(before);
        }
        if pairs {
            let window = &tokens[start..start + (page_size + 1) * TOKEN_BYTES];
            paired.clear();
            paired.extend(window.windows(2 * TOKEN_BYTES).step_by(TOKEN_BYTES).flatten());
            digest.update(&paired);
        } else {
            digest.update(bytes);
        }
        let digest: [u8; DIGEST_BYTES] = digest.finalize().into();
        hashes.extend_from_slice(&digest[..PAGE_BYTES]);
        before = Some(digest);
    }
    hashes
}
