//! Which engine hash a block has, as last told: see `kvcore/links.py`.

use hashbrown::HashTable;

use super::table::Keys;

const SHARDS: usize = 64;

/// Of the middle of a hash: a shard's table uses both ends.
#[inline]
fn shard_of(hash: u64) -> usize {
    (hash >> 32) as usize % SHARDS
}

#[derive(Clone, Copy)]
struct Link {
    own: u64,
    engine: u64,
}

/// In shards, so that none grows for long.
struct Generation {
    shards: Vec<HashTable<Link>>,
    length: usize,
}

impl Generation {
    fn new() -> Self {
        Self { shards: (0..SHARDS).map(|_| HashTable::new()).collect(), length: 0 }
    }

    fn get(&self, hash: u64, own: u64) -> Option<u64> {
        self.shards[shard_of(hash)].find(hash, |link| link.own == own).map(|link| link.engine)
    }
}

/// Two generations: when the younger is full, the older goes.
pub struct Links {
    keys: Keys,
    pub limit: usize,
    half: usize,
    young: Generation,
    old: Generation,
}

impl Links {
    /// `None` for none.
    pub fn new(keys: Keys, limit: usize) -> Option<Self> {
        let half = limit.div_ceil(2);
        (limit > 0).then(|| Self { keys, limit, half, young: Generation::new(), old: Generation::new() })
    }

    pub fn len(&self) -> usize {
        self.young.length + self.old.length
    }

    pub fn bytes(&self) -> usize {
        let shards = self.young.shards.iter().chain(&self.old.shards);
        shards.map(HashTable::allocation_size).sum()
    }

    #[inline]
    pub fn store(&mut self, own: u64, engine: u64) {
        let keys = self.keys;
        let hash = keys.mix(own);
        let number = shard_of(hash);
        if let Some(link) = self.young.shards[number].find_mut(hash, |link| link.own == own) {
            link.engine = engine;
            return;
        }
        if self.young.length >= self.half {
            self.old = std::mem::replace(&mut self.young, Generation::new());
        }
        let rehash = |link: &Link| keys.mix(link.own);
        self.young.shards[number].insert_unique(hash, Link { own, engine }, rehash);
        self.young.length += 1;
    }

    /// The engine hash of `own`; 0 where it is not known.
    #[inline]
    pub fn engine(&self, own: u64) -> u64 {
        let hash = self.keys.mix(own);
        self.young.get(hash, own).or_else(|| self.old.get(hash, own)).unwrap_or(0)
    }
}
