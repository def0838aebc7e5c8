//! Presence of all groups of all ranks: per chain hash the set of groups that hold it.
//!
//! A set is a number: 0 is empty, the upper bit marks a set of one place, any other counts into a pool in which every set
//! stands once. Equal numbers are equal sets, so that a run of blocks with the same holders costs one operation on sets.

use hashbrown::HashTable;

use super::links::Links;
use super::table::{ChainTable, Keys};

/// A set of places as a number.
pub type Mask = u32;

const SINGLE: u32 = 1 << 31;
/// Groups of all ranks together.
pub const MAX_PLACES: usize = 1 << 16;
/// Sets that nobody uses are kept for a while: most are soon needed again.
const IDLE: usize = 1024;
const CACHED: usize = 512;

pub fn single(place: u32) -> Mask {
    SINGLE | place
}

/// The place of a set of one.
#[inline]
pub fn as_single(mask: Mask) -> Option<u32> {
    (mask & SINGLE != 0).then_some(mask & !SINGLE)
}

#[derive(Clone, Copy, Default)]
struct Step {
    key: u64,
    version: u32,
    mask: Mask,
}

/// The sets of two places and more.
pub struct Pool {
    keys: Keys,
    /// Words of a set.
    width: usize,
    words: Vec<u64>,
    uses: Vec<u32>,
    is_idle: Vec<bool>,
    numbers: HashTable<u32>,
    idle: std::collections::VecDeque<u32>,
    free: Vec<u32>,
    /// Counts whenever a number gets another meaning.
    version: u32,
    steps: Vec<Step>,
    buffer: Vec<u64>,
}

impl Pool {
    pub fn new(keys: Keys) -> Self {
        Self {
            keys,
            width: 1,
            words: vec![0],
            uses: vec![0],
            is_idle: vec![false],
            numbers: HashTable::new(),
            idle: std::collections::VecDeque::new(),
            free: Vec::new(),
            version: 1,
            steps: vec![Step::default(); CACHED],
            buffer: Vec::new(),
        }
    }

    pub fn width(&self) -> usize {
        self.width
    }

    pub fn bytes(&self) -> usize {
        self.words.capacity() * 8 + self.uses.capacity() * 5 + self.numbers.capacity() * 5 + self.idle.capacity() * 4
    }

    /// The words of a set that is neither empty nor of one place.
    #[inline]
    pub fn words(&self, mask: Mask) -> &[u64] {
        let start = mask as usize * self.width;
        &self.words[start..start + self.width]
    }

    #[inline]
    pub fn contains(&self, mask: Mask, place: u32) -> bool {
        match as_single(mask) {
            Some(only) => only == place,
            None => self.words(mask)[place as usize / 64] >> (place % 64) & 1 == 1,
        }
    }

    /// `set &= mask`; whether that changed it.
    #[inline]
    pub fn intersect(&self, set: &mut [u64], mask: Mask) -> bool {
        let mut changed = 0;
        if let Some(place) = as_single(mask) {
            for (at, word) in set.iter_mut().enumerate() {
                let kept = if at == place as usize / 64 { *word & 1 << (place % 64) } else { 0 };
                changed |= *word ^ kept;
                *word = kept;
            }
        } else {
            for (word, other) in set.iter_mut().zip(self.words(mask)) {
                let kept = *word & other;
                changed |= *word ^ kept;
                *word = kept;
            }
        }
        changed != 0
    }

    /// Room for `places`.
    pub fn reserve(&mut self, places: usize) {
        let width = places.div_ceil(64).max(1);
        if width <= self.width {
            return;
        }
        // Doubled, so that a fleet that comes one by one costs little.
        let width = width.next_power_of_two();
        let mut words = vec![0; self.uses.len() * width];
        for (new, old) in words.chunks_exact_mut(width).zip(self.words.chunks_exact(self.width)) {
            new[..self.width].copy_from_slice(old);
        }
        self.words = words;
        self.width = width;
        self.rebuild();
    }

    fn rebuild(&mut self) {
        let numbers: Vec<u32> = self.numbers.iter().copied().collect();
        self.numbers.clear();
        for number in numbers {
            let hash = hash_of(self.keys, self.words(number));
            let (keys, words, width) = (self.keys, &self.words, self.width);
            self.numbers.insert_unique(hash, number, |&other| hash_of(keys, slice(words, other, width)));
        }
    }

    /// The set with `place` added (or taken away).
    #[inline]
    fn step(&mut self, mask: Mask, place: u32, add: bool) -> Mask {
        match as_single(mask) {
            Some(only) if only == place => return if add { mask } else { 0 },
            Some(_) if !add => return mask,
            None if mask == 0 => return if add { single(place) } else { 0 },
            _ => {}
        }
        let key = u64::from(mask) << 32 | u64::from(place) << 1 | u64::from(add);
        let at = (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 55) as usize;
        let cached = self.steps[at];
        if cached.key == key && cached.version == self.version {
            return cached.mask;
        }
        let result = self.step_slowly(mask, place, add);
        self.steps[at] = Step { key, version: self.version, mask: result };
        result
    }

    #[cold]
    fn step_slowly(&mut self, mask: Mask, place: u32, add: bool) -> Mask {
        let mut words = std::mem::take(&mut self.buffer);
        words.clear();
        if let Some(only) = as_single(mask) {
            words.resize(self.width, 0);
            words[only as usize / 64] |= 1 << (only % 64);
        } else {
            words.extend_from_slice(self.words(mask));
        }
        let bit = 1 << (place % 64);
        if add {
            words[place as usize / 64] |= bit;
        } else {
            words[place as usize / 64] &= !bit;
        }
        let result = match words.iter().map(|word| word.count_ones()).sum::<u32>() {
            0 => 0,
            1 => {
                let at = words.iter().position(|word| *word != 0).unwrap_or(0);
                single(at as u32 * 64 + words[at].trailing_zeros())
            }
            _ => self.intern(&words),
        };
        self.buffer = words;
        result
    }

    fn intern(&mut self, set: &[u64]) -> Mask {
        let hash = hash_of(self.keys, set);
        let (keys, width) = (self.keys, self.width);
        if let Some(&number) = self.numbers.find(hash, |&other| slice(&self.words, other, width) == set) {
            return number;
        }
        let number = self.unused();
        self.words[number as usize * width..(number as usize + 1) * width].copy_from_slice(set);
        let words = &self.words;
        self.numbers.insert_unique(hash, number, |&other| hash_of(keys, slice(words, other, width)));
        // Idle until somebody uses it.
        self.is_idle[number as usize] = true;
        self.idle.push_back(number);
        number
    }

    fn unused(&mut self) -> u32 {
        while self.idle.len() > IDLE {
            let Some(number) = self.idle.pop_front() else { break };
            self.is_idle[number as usize] = false;
            if self.uses[number as usize] == 0 {
                self.forget(number);
                self.free.push(number);
            }
        }
        if let Some(number) = self.free.pop() {
            return number;
        }
        let number = self.uses.len() as u32;
        self.uses.push(0);
        self.is_idle.push(false);
        self.words.resize(self.words.len() + self.width, 0);
        number
    }

    fn forget(&mut self, number: u32) {
        let hash = hash_of(self.keys, self.words(number));
        if let Ok(entry) = self.numbers.find_entry(hash, |&other| other == number) {
            entry.remove();
        }
        self.version = self.version.wrapping_add(1);
    }

    #[inline]
    fn acquire(&mut self, mask: Mask) {
        if as_single(mask).is_none() {
            self.uses[mask as usize] += 1;
        }
    }

    #[inline]
    fn release(&mut self, mask: Mask) {
        if as_single(mask).is_some() || mask == 0 {
            return;
        }
        let uses = &mut self.uses[mask as usize];
        *uses -= 1;
        if *uses == 0 && !self.is_idle[mask as usize] {
            self.is_idle[mask as usize] = true;
            self.idle.push_back(mask);
        }
    }

    /// Whether most of what was taken is not used.
    fn is_sparse(&self) -> bool {
        let used = self.uses.len() - self.free.len() - self.idle.len().min(self.uses.len() - self.free.len());
        self.uses.len() > 4 * IDLE && used * 4 < self.uses.len()
    }
}

fn slice(words: &[u64], number: u32, width: usize) -> &[u64] {
    &words[number as usize * width..(number as usize + 1) * width]
}

fn hash_of(keys: Keys, set: &[u64]) -> u64 {
    set.iter().fold(0, |hash, word| keys.mix(hash ^ word).rotate_left(17))
}

/// Presence in any tier, and per tier below the device of those whose best tier it is.
pub struct Masks {
    pub pool: Pool,
    pub presence: ChainTable,
    pub below: [ChainTable; 3],
    pub keys: Keys,
    /// Engine hash of each block, where that is asked for.
    pub links: Option<Links>,
    /// Room for the chain hashes of one event, used again and again.
    pub chain: Vec<u64>,
}

impl Masks {
    pub fn new(links: usize) -> Self {
        let keys = Keys::random();
        let table = || ChainTable::new(keys);
        let (presence, below) = (table(), [table(), table(), table()]);
        Self { pool: Pool::new(keys), presence, below, keys, links: Links::new(keys, links), chain: Vec::new() }
    }

    /// Keep so many links; those kept under another limit go.
    pub fn keep_links(&mut self, limit: usize) {
        if self.links.as_ref().map_or(0, |links| links.limit) != limit {
            self.links = Links::new(self.keys, limit);
        }
    }

    /// The engine names the block `own` so.
    #[inline]
    pub fn link(&mut self, own: u64, engine: u64) {
        if let Some(links) = &mut self.links {
            links.store(own, engine);
        }
    }

    /// Mark `own` as held by `place`; whether it was not.
    #[inline]
    pub fn add(&mut self, own: u64, place: u32) -> bool {
        add(&mut self.presence, &mut self.pool, own, place)
    }

    #[inline]
    pub fn discard(&mut self, own: u64, place: u32) {
        discard(&mut self.presence, &mut self.pool, own, place);
    }

    #[inline]
    pub fn holds(&self, own: u64, place: u32) -> bool {
        match self.presence.get(own) {
            0 => false,
            mask => self.pool.contains(mask, place),
        }
    }

    /// The same for those whose best tier is `tier`, 1 to 3.
    pub fn add_below(&mut self, tier: usize, own: u64, place: u32) {
        add(&mut self.below[tier - 1], &mut self.pool, own, place);
    }

    pub fn discard_below(&mut self, tier: usize, own: u64, place: u32) {
        discard(&mut self.below[tier - 1], &mut self.pool, own, place);
    }

    /// Bytes of the tables and the sets.
    pub fn bytes(&self) -> usize {
        let links = self.links.as_ref().map_or(0, Links::bytes);
        self.pool.bytes() + self.presence.bytes() + self.below.iter().map(ChainTable::bytes).sum::<usize>() + links
    }

    /// Give back the memory of what is gone.
    pub fn shrink(&mut self) {
        self.presence.shrink();
        self.below.iter_mut().for_each(ChainTable::shrink);
        if self.pool.is_sparse() {
            self.renumber();
        }
    }

    /// A new pool with the sets in use alone.
    fn renumber(&mut self) {
        let mut pool = Pool::new(self.keys);
        pool.reserve(self.pool.width * 64);
        pool.version = self.pool.version.wrapping_add(1);
        let old = &self.pool;
        let mut numbers = vec![0u32; old.uses.len()];
        for table in std::iter::once(&mut self.presence).chain(&mut self.below) {
            table.change_all(|mask| {
                if as_single(mask).is_some() {
                    return mask;
                }
                let number = &mut numbers[mask as usize];
                if *number == 0 {
                    *number = pool.intern(old.words(mask));
                }
                pool.acquire(*number);
                *number
            });
        }
        self.pool = pool;
    }
}

#[inline]
fn add(table: &mut ChainTable, pool: &mut Pool, own: u64, place: u32) -> bool {
    let (at, mask) = table.find(own);
    if mask == 0 {
        table.put(at, own, single(place));
        return true;
    }
    if pool.contains(mask, place) {
        return false;
    }
    let changed = pool.step(mask, place, true);
    pool.acquire(changed);
    pool.release(mask);
    table.change(at, changed);
    true
}

#[inline]
fn discard(table: &mut ChainTable, pool: &mut Pool, own: u64, place: u32) {
    let (at, mask) = table.find(own);
    if mask == 0 || !pool.contains(mask, place) {
        return;
    }
    let changed = pool.step(mask, place, false);
    if changed == 0 {
        table.remove(at);
    } else {
        pool.acquire(changed);
        table.change(at, changed);
    }
    pool.release(mask);
}
