//! Object keys of a pool: which page, under which prefix, and which of the page's objects.
//!
//! The rules are those of `kvcore/pool_keys.py` (spec: pool-events §6).

use super::page_hash::PAGE_BYTES;
use super::pages::Page;

/// Longest component, in bytes.
pub const MAX_COMPONENT_BYTES: usize = 256;
const DIGEST_DIGITS: usize = 64;
const HASH_DIGITS: std::ops::RangeInclusive<usize> = 8..=128;

/// How a key is built.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scheme {
    Hicache,
    Vllm,
    Lmcache,
}

impl Scheme {
    pub const ALL: [Self; 3] = [Self::Hicache, Self::Vllm, Self::Lmcache];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Hicache => "sglang_hicache",
            Self::Vllm => "vllm_mooncake",
            Self::Lmcache => "lmcache",
        }
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|scheme| scheme.name() == name)
    }
}

/// A key taken apart; prefix and component are parts of it, the component perhaps in pieces.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Key<'a> {
    pub scheme: Scheme,
    pub prefix: &'a str,
    pub page: Page,
    /// To be joined.
    pub component: [&'a str; 2],
}

/// `None`: nobody's key that we know, or one that is too long.
pub fn parse(key: &str, max_bytes: usize) -> Option<Key<'_>> {
    if key.len() > max_bytes {
        return None;
    }
    let at = key.as_bytes().contains(&b'@');
    let parsed = at.then(|| parse_vllm(key).or_else(|| parse_lmcache(key))).flatten().or_else(|| parse_hicache(key))?;
    let length: usize = parsed.component.iter().map(|part| part.len()).sum();
    (length <= MAX_COMPONENT_BYTES).then_some(parsed)
}

/// Whether all are lower-case hexadecimal digits. Without branches, so that many are looked at in one instruction.
#[inline]
fn is_hex(text: &[u8]) -> bool {
    let is_digit = |byte: u8| u8::from(byte.wrapping_sub(b'0') < 10) | u8::from(byte.wrapping_sub(b'a') < 6);
    text.iter().fold(1, |all, byte| all & is_digit(*byte)) == 1
}

/// The value of a digit that `is_hex`.
#[inline]
fn value_of(digit: u8) -> u8 {
    (digit & 0x0f) + 9 * (digit >> 6)
}

fn is_hash(text: &str) -> bool {
    HASH_DIGITS.contains(&text.len()) && is_hex(text.as_bytes())
}

fn are_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// `prefix_hash_component`: the rightmost digest between underscores with something after it.
fn parse_hicache(key: &str) -> Option<Key<'_>> {
    let bytes = key.as_bytes();
    let mut end = bytes.len();
    loop {
        // The part before `end`, whose underscore stands at `end` if anything follows.
        let start = bytes[..end].iter().rposition(|byte| *byte == b'_').map_or(0, |at| at + 1);
        if end - start == DIGEST_DIGITS && bytes.len() - end >= 2 && is_hex(&bytes[start..end]) {
            let mut page = [0; PAGE_BYTES];
            for (byte, pair) in page.iter_mut().zip(bytes[start..end].chunks_exact(2)) {
                *byte = value_of(pair[0]) << 4 | value_of(pair[1]);
            }
            let component = [&key[end..], ""];
            return Some(Key { scheme: Scheme::Hicache, prefix: &key[..start], page, component });
        }
        end = start.checked_sub(1)?;
    }
}

/// The last 16 digits of a hash, as an engine's event has it, behind eight zero bytes.
fn short_page(hash: &str) -> Page {
    let bytes = hash.as_bytes();
    let digits = &bytes[bytes.len().saturating_sub(16)..];
    let value = digits.iter().fold(0u64, |value, digit| value << 4 | u64::from(value_of(*digit)));
    let mut page = [0; PAGE_BYTES];
    page[8..].copy_from_slice(&value.to_be_bytes());
    page
}

const NUMBERED: [&str; 7] = ["head_or_tp_rank:", "dcp:", "pp_rank:", "group:", "layer_id:", "pcp", "dcp"];

/// Whether it names a rank, a group or the like, and whether that is the rank of tensor parallelism.
fn names_rank(part: &str) -> Option<bool> {
    if let Some(number) = part.strip_prefix("tp_rank:") {
        return are_digits(number).then_some(true);
    }
    for word in ["cache_role:", "cache_family:"] {
        if let Some(rest) = part.strip_prefix(word) {
            return (!rest.is_empty()).then_some(false);
        }
    }
    let name = NUMBERED.iter().find(|name| part.strip_prefix(**name).is_some_and(are_digits))?;
    Some(*name == NUMBERED[0])
}

/// `prefix@ranks@hash`, perhaps `@layer` after it.
fn parse_vllm(key: &str) -> Option<Key<'_>> {
    let (before, last) = key.rsplit_once('@')?;
    let whole = is_hash(last).then(|| vllm_of(before, last, "")).flatten();
    whole.or_else(|| {
        let (before, hash) = before.rsplit_once('@')?;
        let layer = &key[before.len() + 1 + hash.len()..];
        (are_digits(last) && is_hash(hash)).then(|| vllm_of(before, hash, layer)).flatten()
    })
}

fn vllm_of<'a>(before: &'a str, hash: &str, layer: &'a str) -> Option<Key<'a>> {
    let mut prefix = before;
    let mut tensor_ranks = 0;
    while let Some((rest, part)) = prefix.rsplit_once('@')
        && let Some(is_tensor_rank) = names_rank(part)
    {
        tensor_ranks += usize::from(is_tensor_rank);
        prefix = rest;
    }
    let starts_with_ranks = !prefix.contains('@') && names_rank(prefix).is_some();
    if tensor_ranks != 1 || prefix.is_empty() || starts_with_ranks {
        return None;
    }
    let component = [&before[prefix.len()..], layer];
    Some(Key { scheme: Scheme::Vllm, prefix, page: short_page(hash), component })
}

/// `model@world@worker@hash@dtype...`
fn parse_lmcache(key: &str) -> Option<Key<'_>> {
    // Where every part begins that has one after it: `end` is that of the candidate for the hash.
    let mut end = key.len();
    while let Some(start) = key[..end].rfind('@').map(|at| at + 1) {
        let tail = &key[end..];
        if is_hash(&key[start..end]) && tail.as_bytes().get(1).is_some_and(u8::is_ascii_alphabetic) {
            let before = &key[..start - 1];
            if let Some((prefix, worker)) = before.rsplit_once('@')
                && let Some((model, world)) = prefix.rsplit_once('@')
                && are_digits(worker)
                && are_digits(world)
                && model.bytes().any(|byte| byte != b'@')
            {
                let page = short_page(&key[start..end]);
                // "@worker@" of the key, then "@dtype..." after the hash.
                let component = [&key[prefix.len()..start], tail];
                return Some(Key { scheme: Scheme::Lmcache, prefix, page, component });
            }
        }
        end = start - 1;
    }
    None
}
