//! A block's identity: XXH3-64 over its tokens, chained to the block before it.
//!
//! The rules and their sources are those of the pure-Python twin, `kvcore/hashing.py`
//! (spec: index-and-routing §1.1, §1.2). Hashes are u64, tokens u32 little-endian bytes.

use xxhash_rust::const_xxh3::const_custom_default_secret;
use xxhash_rust::xxh3::{xxh3_64_with_secret, xxh3_64_with_seed};

/// Seed of the local hashes of the base model without a salt, and of every chain step.
pub const SEED: u64 = 1337;
pub const TOKEN_BYTES: usize = 4;
/// Longer inputs are hashed under a secret derived from the seed, which is worth deriving once for all blocks.
const MAX_BYTES_WITHOUT_SECRET: usize = 240;

/// Hashes of the multimodal objects in a block, by the block's position, positions ascending.
pub type Multimodal = [(usize, Vec<u64>)];

/// Seed of one namespace; a missing or empty string adds nothing.
pub fn seed_of(adapter: &[u8], salt: &[u8]) -> u64 {
    let part = |text: &[u8], seed| if text.is_empty() { 0 } else { xxh3_64_with_seed(text, seed) };
    SEED.wrapping_add(part(adapter, 0)).wrapping_add(part(salt, 1))
}

/// u64 of a multimodal identifier: the first 16 digits of a 64-digit hex digest, else XXH3 (seed 0) of the text.
pub fn multimodal_hash(identifier: &[u8]) -> u64 {
    match identifier.len() {
        // A digest is ASCII, so that 64 characters of it are 64 bytes.
        64 => digest_head(identifier).unwrap_or_else(|| xxh3_64_with_seed(identifier, 0)),
        _ => xxh3_64_with_seed(identifier, 0),
    }
}

/// Big-endian value of the first eight bytes. White space between two digits of different bytes is passed over.
fn digest_head(text: &[u8]) -> Option<u64> {
    let mut value = 0u64;
    let mut bytes = 0;
    let mut rest = text.iter().copied();
    while let Some(first) = rest.next() {
        if matches!(first, b' ' | b'\t' | b'\n' | b'\r' | 0x0b | 0x0c) {
            continue;
        }
        let high = char::from(first).to_digit(16)?;
        let low = char::from(rest.next()?).to_digit(16)?;
        if bytes < 8 {
            value = value << 8 | u64::from(high << 4 | low);
            bytes += 1;
        }
    }
    Some(value)
}

/// Chain hash of a block from its local hash and the chain hash of the block before it.
#[inline]
pub fn chain_step(parent: Option<u64>, local: u64) -> u64 {
    let Some(parent) = parent else { return local };
    let mut pair = [0; 16];
    pair[..8].copy_from_slice(&parent.to_le_bytes());
    pair[8..].copy_from_slice(&local.to_le_bytes());
    xxh3_64_with_seed(&pair, SEED)
}

/// How many full blocks these tokens make; under Eagle the last token is only the window of the block before it.
pub fn block_count(tokens: &[u8], block_size: usize, eagle: bool) -> usize {
    (tokens.len() / TOKEN_BYTES).saturating_sub(usize::from(eagle)) / block_size
}

/// Local hash of every full block, handed to `take` in order.
pub fn local_hashes(
    tokens: &[u8],
    block_size: usize,
    seed: u64,
    mm: &Multimodal,
    eagle: bool,
    mut take: impl FnMut(u64),
) {
    let count = block_count(tokens, block_size, eagle);
    if count == 0 {
        return;
    }
    let stride = block_size * TOKEN_BYTES;
    let window = stride + if eagle { TOKEN_BYTES } else { 0 };
    let secret = (window > MAX_BYTES_WITHOUT_SECRET).then(|| const_custom_default_secret(seed));
    let mut mm = mm.iter().peekable();
    let mut buffer = Vec::new();
    for position in 0..count {
        let block = &tokens[position * stride..position * stride + window];
        match mm.next_if(|(at, _)| *at == position) {
            None => take(match &secret {
                None => xxh3_64_with_seed(block, seed),
                Some(secret) => xxh3_64_with_secret(block, secret),
            }),
            Some((_, objects)) => {
                let mut objects = objects.clone();
                objects.sort_unstable();
                buffer.clear();
                buffer.extend_from_slice(block);
                buffer.extend(objects.iter().flat_map(|object| object.to_le_bytes()));
                take(xxh3_64_with_seed(&buffer, seed));
            }
        }
    }
}

/// Chain hashes of every full block, after `parent`.
pub fn chain_hashes(
    tokens: &[u8],
    block_size: usize,
    seed: u64,
    mm: &Multimodal,
    mut parent: Option<u64>,
    eagle: bool,
) -> Vec<u64> {
    let mut chain = Vec::with_capacity(block_count(tokens, block_size, eagle));
    local_hashes(tokens, block_size, seed, mm, eagle, |local| {
        let own = chain_step(parent, local);
        parent = Some(own);
        chain.push(own);
    });
    chain
}

/// Chain hashes with the partial tail hashed like a block (spec: identity-and-traces §2.5).
pub fn sequence_hashes_with_tail(tokens: &[u8], block_size: usize) -> Vec<u64> {
    let mut chain = chain_hashes(tokens, block_size, SEED, &[], None, false);
    let full = chain.len() * block_size.min(tokens.len()) * TOKEN_BYTES;
    let tail = &tokens[full..];
    if !tail.is_empty() {
        chain.push(chain_step(chain.last().copied(), xxh3_64_with_seed(tail, SEED)));
    }
    chain
}
