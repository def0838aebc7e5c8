//! The two hash tables of the index: chain hash to mask, shared by all, and engine hash to block, one per group.
//!
//! Both are open addressing with linear probing and backward-shift deletion, at most three quarters full, and grow by
//! half, by a quarter when they are large. Keys are folded with secrets of the index, so that nobody can choose keys that collide.

use std::hash::{BuildHasher, RandomState};

const SHARDS: usize = 64;
const SHARD_BITS: u32 = SHARDS.trailing_zeros();
const SMALLEST: usize = 16;
/// From here on tables grow by a quarter, not by half: memory weighs more than the time to fill them.
const LARGE: usize = 4096;

/// How the keys of one index are mixed.
#[derive(Clone, Copy)]
pub struct Keys {
    first: u64,
    second: u64,
}

impl Keys {
    pub fn random() -> Self {
        let random = RandomState::new();
        Self { first: random.hash_one(1), second: random.hash_one(2) | 1 }
    }

    #[inline]
    pub fn mix(self, key: u64) -> u64 {
        let product = u128::from(key ^ self.first) * u128::from(self.second);
        product as u64 ^ (product >> 64) as u64
    }
}

/// Ask for the cache line at `place` before it is needed.
#[inline]
pub fn prefetch<T>(place: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing and never faults, whatever the address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(place.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}

/// Place of a hash among `capacity` places: its upper half as a fraction.
#[inline]
fn place(hash: u64, capacity: usize) -> usize {
    ((u128::from(hash) * capacity as u128) >> 64) as usize
}

fn is_full(length: usize, capacity: usize) -> bool {
    length >= capacity - capacity / 4
}

fn larger(capacity: usize) -> usize {
    let more = if capacity < LARGE { capacity / 2 } else { capacity / 4 };
    SMALLEST.max(capacity + more)
}

/// Capacity for `length` entries with room to grow.
fn fitting(length: usize) -> usize {
    if length == 0 { 0 } else { SMALLEST.max(length + length * 2 / 3) }
}

#[derive(Clone, Copy)]
#[repr(C, packed(4))]
struct Slot {
    key: u64,
    value: u32, // 0: empty
}

const EMPTY: Slot = Slot { key: 0, value: 0 };

#[derive(Default)]
struct Shard {
    slots: Vec<Slot>,
    length: usize,
}

/// Chain hash to a value that is never 0, in shards so that none grows for long.
pub struct ChainTable {
    keys: Keys,
    shards: Vec<Shard>,
}

/// Where a key stands, or would stand.
#[derive(Clone, Copy)]
pub struct At {
    shard: usize,
    slot: usize,
}

impl ChainTable {
    pub fn new(keys: Keys) -> Self {
        Self { keys, shards: (0..SHARDS).map(|_| Shard::default()).collect() }
    }

    pub fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.length).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.shards.iter().all(|shard| shard.length == 0)
    }

    /// Bytes that the slots take.
    pub fn bytes(&self) -> usize {
        self.shards.iter().map(|shard| shard.slots.capacity() * size_of::<Slot>()).sum()
    }

    #[inline]
    fn home(&self, key: u64) -> At {
        let hash = self.keys.mix(key);
        let shard = (hash >> (64 - SHARD_BITS)) as usize;
        At { shard, slot: place(hash << SHARD_BITS, self.shards[shard].slots.len()) }
    }

    #[inline]
    pub fn prefetch(&self, key: u64) {
        let At { shard, slot } = self.home(key);
        prefetch(self.shards[shard].slots.as_ptr().wrapping_add(slot));
    }

    /// The value of `key`; 0 without one.
    #[inline]
    pub fn get(&self, key: u64) -> u32 {
        let At { shard, mut slot } = self.home(key);
        let slots = &self.shards[shard].slots;
        while let Some(&Slot { key: found, value }) = slots.get(slot) {
            if value == 0 || found == key {
                return value;
            }
            slot += 1;
            if slot == slots.len() {
                slot = 0;
            }
        }
        0
    }

    /// Where `key` stands and its value; 0 and where it may be put, for which there is room.
    #[inline]
    pub fn find(&mut self, key: u64) -> (At, u32) {
        let hash = self.keys.mix(key);
        let number = (hash >> (64 - SHARD_BITS)) as usize;
        let keys = self.keys;
        let shard = &mut self.shards[number];
        if is_full(shard.length, shard.slots.len()) {
            shard.resize(larger(shard.slots.len()), keys);
        }
        let mut slot = place(hash << SHARD_BITS, shard.slots.len());
        loop {
            let Slot { key: found, value } = shard.slots[slot];
            if value == 0 || found == key {
                return (At { shard: number, slot }, value);
            }
            slot += 1;
            if slot == shard.slots.len() {
                slot = 0;
            }
        }
    }

    /// Put a value where `find` found none.
    #[inline]
    pub fn put(&mut self, at: At, key: u64, value: u32) {
        let shard = &mut self.shards[at.shard];
        shard.slots[at.slot] = Slot { key, value };
        shard.length += 1;
    }

    #[inline]
    pub fn change(&mut self, at: At, value: u32) {
        self.shards[at.shard].slots[at.slot].value = value;
    }

    pub fn remove(&mut self, at: At) {
        let keys = self.keys;
        self.shards[at.shard].remove(at.slot, keys);
    }

    /// Give back what is mostly empty.
    pub fn shrink(&mut self) {
        let keys = self.keys;
        for shard in &mut self.shards {
            if shard.slots.len() > SMALLEST && shard.length * 4 < shard.slots.len() {
                shard.resize(fitting(shard.length), keys);
            }
        }
    }

    /// Change every value; none may become 0.
    pub fn change_all(&mut self, mut change: impl FnMut(u32) -> u32) {
        for slot in self.shards.iter_mut().flat_map(|shard| &mut shard.slots) {
            if slot.value != 0 {
                slot.value = change(slot.value);
            }
        }
    }
}

impl Shard {
    fn home(&self, key: u64, keys: Keys) -> usize {
        place(keys.mix(key) << SHARD_BITS, self.slots.len())
    }

    #[cold]
    fn resize(&mut self, capacity: usize, keys: Keys) {
        let old = std::mem::replace(&mut self.slots, vec![EMPTY; capacity]);
        for slot in old.into_iter().filter(|slot| slot.value != 0) {
            let mut at = self.home(slot.key, keys);
            while self.slots[at].value != 0 {
                at = if at + 1 == capacity { 0 } else { at + 1 };
            }
            self.slots[at] = slot;
        }
    }

    fn remove(&mut self, mut hole: usize, keys: Keys) {
        let capacity = self.slots.len();
        let mut next = hole;
        loop {
            next = if next + 1 == capacity { 0 } else { next + 1 };
            let slot = self.slots[next];
            if slot.value == 0 {
                break;
            }
            if may_move(self.home(slot.key, keys), next, hole) {
                self.slots[hole] = slot;
                hole = next;
            }
        }
        self.slots[hole] = EMPTY;
        self.length -= 1;
    }
}

/// Whether an entry at `from`, at home at `home`, may stand at the hole before it: the hole is not before its home.
fn may_move(home: usize, from: usize, to: usize) -> bool {
    if to <= from { home <= to || home > from } else { home <= to && home > from }
}

const NUMBER_BITS: u32 = 27;
const NUMBER: u32 = (1 << NUMBER_BITS) - 1;
/// Blocks of one group that the table can tell apart.
pub const MAX_NUMBERS: usize = NUMBER as usize;

/// Engine hash to number of a block. Only the number and five bits of the hash are kept; the block has the key.
pub struct EngineTable {
    keys: Keys,
    slots: Vec<u32>, // number + 1 below, bits of the hash above; 0: empty
    length: usize,
}

impl EngineTable {
    pub fn new(keys: Keys) -> Self {
        Self { keys, slots: Vec::new(), length: 0 }
    }

    /// One with `length` keys and their numbers.
    pub fn of(keys: Keys, length: usize, all: impl Iterator<Item = (u64, u32)>) -> Self {
        let mut table = Self { keys, slots: vec![0; fitting(length)], length };
        all.for_each(|(engine, number)| table.put(engine, number));
        table
    }

    pub fn len(&self) -> usize {
        self.length
    }

    pub fn bytes(&self) -> usize {
        self.slots.capacity() * size_of::<u32>()
    }

    #[inline]
    pub fn prefetch(&self, engine: u64) {
        let home = place(self.keys.mix(engine), self.slots.len());
        prefetch(self.slots.as_ptr().wrapping_add(home));
    }

    /// A number that is likely to be that of `engine`, without a look at its block.
    #[inline]
    pub fn guess(&self, engine: u64) -> Option<u32> {
        self.find_slot(engine, |_| true).map(|slot| (self.slots[slot] & NUMBER) - 1)
    }

    /// The number of `engine`; `engine_of` gives the key of a number.
    #[inline]
    pub fn get(&self, engine: u64, engine_of: impl Fn(u32) -> u64) -> Option<u32> {
        self.find_slot(engine, |number| engine_of(number) == engine).map(|slot| (self.slots[slot] & NUMBER) - 1)
    }

    #[inline]
    fn find_slot(&self, engine: u64, is_it: impl Fn(u32) -> bool) -> Option<usize> {
        let hash = self.keys.mix(engine);
        let tag = hash as u32 & !NUMBER;
        let mut at = place(hash, self.slots.len());
        while let Some(&slot) = self.slots.get(at) {
            if slot == 0 {
                return None;
            }
            if slot & !NUMBER == tag && is_it((slot & NUMBER) - 1) {
                return Some(at);
            }
            at += 1;
            if at == self.slots.len() {
                at = 0;
            }
        }
        None
    }

    /// Numbers that stand between the place of `engine` and the next empty one, `most` at most.
    #[inline]
    pub fn behind(&self, engine: u64, most: usize, see: impl FnMut(u32)) {
        let home = place(self.keys.mix(engine), self.slots.len());
        let cluster = self.slots.iter().skip(home).take(most).take_while(|slot| **slot != 0);
        cluster.map(|slot| (slot & NUMBER) - 1).for_each(see);
    }

    pub fn is_full(&self) -> bool {
        is_full(self.length, self.slots.len())
    }

    /// Add a key that is not there, where there is room.
    #[inline]
    pub fn insert(&mut self, engine: u64, number: u32) {
        self.put(engine, number);
        self.length += 1;
    }

    #[inline]
    fn put(&mut self, engine: u64, number: u32) {
        let hash = self.keys.mix(engine);
        let mut at = place(hash, self.slots.len());
        while self.slots[at] != 0 {
            at += 1;
            if at == self.slots.len() {
                at = 0;
            }
        }
        self.slots[at] = (number + 1) & NUMBER | hash as u32 & !NUMBER;
    }

    /// Make room; `all` are the keys so far with their numbers.
    #[cold]
    pub fn grow(&mut self, all: impl Iterator<Item = (u64, u32)>) {
        self.slots = vec![0; larger(self.slots.len())];
        all.for_each(|(engine, number)| self.put(engine, number));
    }

    pub fn remove(&mut self, engine: u64, engine_of: impl Fn(u32) -> u64) {
        let Some(mut hole) = self.find_slot(engine, |number| engine_of(number) == engine) else { return };
        let capacity = self.slots.len();
        let mut next = hole;
        loop {
            next = if next + 1 == capacity { 0 } else { next + 1 };
            let slot = self.slots[next];
            if slot == 0 {
                break;
            }
            let wanted = place(self.keys.mix(engine_of((slot & NUMBER) - 1)), capacity);
            if may_move(wanted, next, hole) {
                self.slots[hole] = slot;
                hole = next;
            }
        }
        self.slots[hole] = 0;
        self.length -= 1;
    }
}
