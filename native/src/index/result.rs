//! What one batch did.

use crate::events;

/// Why an event was not applied, or not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    Misaligned,
    BlockSize,
    HashConflict,
    TooManyGroups,
}

const READING: usize = events::Reason::ALL.len();
const NAMES: [&str; READING + 4] = [
    events::Reason::ALL[0].name(),
    events::Reason::ALL[1].name(),
    events::Reason::ALL[2].name(),
    events::Reason::ALL[3].name(),
    "misaligned",
    "block_size",
    "hash_conflict",
    "too_many_groups",
];

/// Counts of blocks; `cleared` and `rejected` of events.
#[derive(Debug, Default, Clone)]
pub struct Applied {
    pub stored: usize,
    pub removed: usize,
    pub cleared: usize,
    pub held: usize,
    pub unknown_removed: usize,
    pub other_groups: usize,
    pub dropped: usize,
    pub evicted: usize,
    pub block_size: Option<u64>,
    counts: [u64; NAMES.len()],
    /// Reasons that only a batch made elsewhere can have.
    pub others: Vec<(String, u64)>,
}

impl Applied {
    /// Of a batch of which these events were left out, by `events::Reason`.
    pub fn new(rejected: &[u64; READING]) -> Self {
        let mut applied = Self::default();
        applied.counts[..READING].copy_from_slice(rejected);
        applied
    }

    pub fn reject(&mut self, reason: Reason) {
        self.counts[READING + reason as usize] += 1;
    }

    /// Reasons that occurred, with their counts.
    pub fn rejected(&self) -> impl Iterator<Item = (&str, u64)> {
        let named = NAMES.iter().copied().zip(self.counts).filter(|(_, count)| *count > 0);
        named.chain(self.others.iter().map(|(name, count)| (name.as_str(), *count)))
    }
}
