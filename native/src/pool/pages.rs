//! The pages of one space of a pool, and for each a number for what is present of it (`super::states`).
//!
//! Pages lie in a slab in the order in which they came, so that a chain that was stored as one is compared as one. A table
//! of u32, in shards so that none grows for long, leads from a page to its place in the slab. It is open addressing with
//! linear probing and backward-shift deletion, at most three quarters full.
//!
//! A chunk of the slab is copied when it is written to while somebody holds a picture of it: dumps and differences see the
//! pages as they were, without stopping anybody.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use super::page_hash::PAGE_BYTES;
use crate::index::{Keys, prefetch};

pub type Page = [u8; PAGE_BYTES];

const CHUNK: usize = 256;
const GROUP: usize = 16;
const SHARD_BITS: u32 = 6;
const SMALLEST: usize = 16;
/// From here on shards grow by a quarter, not by half.
const LARGE: usize = 4096;
/// A slab of which less than one in so many places is free grows; otherwise free places are used again.
const FREE_SHARE: usize = 32;
const NUMBER_BITS: u32 = 25;
const NUMBER: u32 = (1 << NUMBER_BITS) - 1;
/// Pages that the table can tell apart.
pub const MAX_PAGES: usize = NUMBER as usize - CHUNK;
/// Slots ahead of a resize whose pages are asked for.
const AHEAD: usize = 16;

pub struct Chunk {
    groups: [Group; CHUNK / GROUP],
    used: u32,
}

/// Pages with their states close by, so that a page costs one look into memory.
struct Group {
    pages: [Page; GROUP],
    /// 0: free.
    states: [u32; GROUP],
    /// Asked for since the clock's hand passed, a bit each.
    touched: AtomicU32,
}

impl Group {
    const fn empty() -> Self {
        Self { pages: [[0; PAGE_BYTES]; GROUP], states: [0; GROUP], touched: AtomicU32::new(0) }
    }

    fn is_touched(&self, at: usize) -> bool {
        self.touched.load(Relaxed) >> at & 1 == 1
    }
}

impl Clone for Group {
    fn clone(&self) -> Self {
        let touched = AtomicU32::new(self.touched.load(Relaxed));
        Self { pages: self.pages, states: self.states, touched }
    }
}

impl Chunk {
    fn empty() -> Arc<Self> {
        Arc::new(Self { groups: [const { Group::empty() }; CHUNK / GROUP], used: 0 })
    }

    #[inline]
    fn page(&self, at: usize) -> &Page {
        &self.groups[at / GROUP].pages[at % GROUP]
    }

    #[inline]
    fn state(&self, at: usize) -> u32 {
        self.groups[at / GROUP].states[at % GROUP]
    }

    /// Ask for the page and its state.
    #[inline]
    fn prefetch(&self, at: usize) {
        let group = &self.groups[at / GROUP];
        prefetch(&raw const group.pages[at % GROUP]);
        prefetch(&raw const group.states[at % GROUP]);
    }
}

impl Clone for Chunk {
    fn clone(&self) -> Self {
        Self { groups: self.groups.clone(), used: self.used }
    }
}

/// Pages as they stand in the slab, with their states.
pub struct Picture {
    chunks: Vec<Option<Arc<Chunk>>>,
    hand: u32,
    pub length: usize,
}

impl Picture {
    /// Numbers run to here; some may be free.
    pub fn end(&self) -> u32 {
        (self.chunks.len() * CHUNK) as u32
    }

    /// The page, its state, and whether it was asked for since the clock's hand passed. Counted from the hand on and
    /// around. `None`: it is free.
    pub fn entry(&self, place: u32) -> Option<(&Page, u32, bool)> {
        let number = (self.hand as usize + place as usize) % (self.chunks.len() * CHUNK);
        let (chunk, at) = (self.chunks[number / CHUNK].as_deref()?, number % CHUNK);
        let group = &chunk.groups[at / GROUP];
        let (state, touched) = (chunk.state(at), group.is_touched(at % GROUP));
        (state != 0).then_some((chunk.page(at), state, touched))
    }

    /// Every number in use, with its page and state.
    pub fn numbered(&self) -> impl Iterator<Item = (u32, &Page, u32)> {
        let chunks = self.chunks.iter().enumerate().filter_map(|(place, chunk)| Some((place, chunk.as_deref()?)));
        chunks.flat_map(|(place, chunk)| {
            let used = (0..CHUNK).filter(|at| chunk.state(*at) != 0);
            used.map(move |at| ((place * CHUNK + at) as u32, chunk.page(at), chunk.state(at)))
        })
    }
}

#[derive(Default)]
struct Shard {
    slots: Vec<u32>, // number + 1 below, bits of the hash above; 0: empty
    length: usize,
}

/// All pages of a space.
pub struct Pages {
    keys: Keys,
    shards: Vec<Shard>,
    chunks: Vec<Option<Arc<Chunk>>>,
    /// Numbers given out so far, free ones included.
    end: u32,
    used: usize,
    /// Where the last page was put, and after.
    next: u32,
    hand: u32,
}

/// Place of a hash among `capacity` places: its upper half as a fraction.
#[inline]
fn place(hash: u64, capacity: usize) -> usize {
    ((u128::from(hash << SHARD_BITS) * capacity as u128) >> 64) as usize
}

fn larger(capacity: usize) -> usize {
    let more = if capacity < LARGE { capacity / 2 } else { capacity / 4 };
    SMALLEST.max(capacity + more)
}

/// Whether an entry at `from`, at home at `home`, may stand at the hole before it.
fn may_move(home: usize, from: usize, to: usize) -> bool {
    if to <= from { home <= to || home > from } else { home <= to && home > from }
}

impl Pages {
    pub fn new(keys: Keys) -> Self {
        Self {
            keys,
            shards: (0..1 << SHARD_BITS).map(|_| Shard::default()).collect(),
            chunks: Vec::new(),
            end: 0,
            used: 0,
            next: 0,
            hand: 0,
        }
    }

    pub fn len(&self) -> usize {
        self.used
    }

    /// What there is now.
    pub fn picture(&self) -> Picture {
        Picture { chunks: self.chunks.clone(), hand: self.hand, length: self.used }
    }

    pub fn bytes(&self) -> usize {
        let chunks = self.chunks.iter().flatten().count() * size_of::<Chunk>();
        chunks + self.shards.iter().map(|shard| shard.slots.capacity() * 4).sum::<usize>()
    }

    #[inline]
    fn chunk(&self, number: u32) -> Option<(&Chunk, usize)> {
        let chunk = self.chunks.get(number as usize / CHUNK)?.as_deref()?;
        Some((chunk, number as usize % CHUNK))
    }

    #[inline]
    fn chunk_mut(&mut self, number: u32) -> Option<(&mut Chunk, usize)> {
        let chunk = Arc::make_mut(self.chunks.get_mut(number as usize / CHUNK)?.as_mut()?);
        Some((chunk, number as usize % CHUNK))
    }

    /// The state of a number; 0 of a free one.
    #[inline]
    pub fn state(&self, number: u32) -> u32 {
        self.chunk(number).map_or(0, |(chunk, at)| chunk.state(at))
    }

    #[inline]
    pub fn page(&self, number: u32) -> Page {
        self.chunk(number).map_or([0; PAGE_BYTES], |(chunk, at)| *chunk.page(at))
    }

    /// How many of `pages` stand one after the other from `number` on, all in `state`.
    #[inline]
    pub fn run(&self, number: u32, pages: &[Page], state: u32) -> usize {
        let mut run = 0;
        while run < pages.len() {
            let Some((chunk, at)) = self.chunk(number + run as u32) else { break };
            let (group, at) = (&chunk.groups[at / GROUP], at % GROUP);
            let wanted = &pages[run..pages.len().min(run + GROUP - at)];
            let (here, states) = (&group.pages[at..at + wanted.len()], &group.states[at..at + wanted.len()]);
            let is_whole = states.iter().fold(0, |other, here| other | here ^ state) == 0
                && here.as_flattened() == wanted.as_flattened();
            let same = if is_whole {
                wanted.len()
            } else {
                let each = wanted.iter().zip(here).zip(states);
                each.take_while(|((wanted, page), other)| wanted == page && **other == state).count()
            };
            run += same;
            if same < wanted.len() {
                break;
            }
        }
        run
    }

    /// How many of `pages`, from the last one on, stand one after the other before `number`.
    pub fn run_before(&self, number: u32, pages: &[Page]) -> usize {
        let same = |(back, page): (u32, &Page)| {
            let place = number.checked_sub(back + 1).and_then(|number| self.chunk(number));
            place.is_some_and(|(chunk, at)| chunk.state(at) != 0 && chunk.page(at) == page)
        };
        (0..).zip(pages.iter().rev()).take_while(|pair| same(*pair)).count()
    }

    /// Ask for so many pages from `number` on, and their states.
    pub fn prefetch_run(&self, number: u32, length: usize) {
        let Some((chunk, at)) = self.chunk(number) else { return };
        let stop = CHUNK.min(at + length);
        for group in &chunk.groups[at / GROUP..stop.div_ceil(GROUP)] {
            for page in group.pages.iter().step_by(64 / PAGE_BYTES) {
                prefetch(&raw const *page);
            }
            prefetch(&raw const group.states);
        }
    }

    /// Set the state of a page that is there.
    #[inline]
    pub fn change(&mut self, number: u32, state: u32) {
        if let Some((chunk, at)) = self.chunk_mut(number) {
            chunk.groups[at / GROUP].states[at % GROUP] = state;
        }
    }

    /// Mark a page as asked for.
    #[inline]
    pub fn touch(&self, number: u32) {
        if let Some((chunk, at)) = self.chunk(number) {
            chunk.touch(at, 1);
        }
    }

    /// The same of pages that stand one after the other.
    pub fn touch_run(&self, mut number: u32, mut length: usize) {
        while length > 0 {
            let Some((chunk, at)) = self.chunk(number) else { return };
            let here = length.min(CHUNK - at);
            chunk.touch(at, here);
            number += here as u32;
            length -= here;
        }
    }

    #[inline]
    pub fn hash(&self, page: &Page) -> u64 {
        let value = u128::from_le_bytes(*page);
        self.keys.mix(self.keys.mix(value as u64) ^ (value >> 64) as u64)
    }

    /// Ask for the place of `hash` in the table.
    #[inline]
    pub fn prefetch(&self, hash: u64) {
        let slots = &self.shards[(hash >> (64 - SHARD_BITS)) as usize].slots;
        prefetch(slots.as_ptr().wrapping_add(place(hash, slots.len())));
    }

    /// Ask for the page that is likely to be that of `hash`.
    #[inline]
    pub fn prefetch_page(&self, hash: u64) {
        if let Some(at) = self.slot(hash, |_| true) {
            let slot = self.shards[(hash >> (64 - SHARD_BITS)) as usize].slots[at];
            if let Some((chunk, at)) = self.chunk((slot & NUMBER) - 1) {
                chunk.prefetch(at);
            }
        }
    }

    #[inline]
    fn slot(&self, hash: u64, is_it: impl Fn(u32) -> bool) -> Option<usize> {
        let slots = &self.shards[(hash >> (64 - SHARD_BITS)) as usize].slots;
        let tag = hash as u32 & !NUMBER;
        let mut at = place(hash, slots.len());
        while let Some(&slot) = slots.get(at) {
            if slot == 0 {
                return None;
            }
            if slot & !NUMBER == tag && is_it((slot & NUMBER) - 1) {
                return Some(at);
            }
            at += 1;
            if at == slots.len() {
                at = 0;
            }
        }
        None
    }

    /// The number of a page whose `hash` is at hand.
    #[inline]
    pub fn find(&self, hash: u64, page: &Page) -> Option<u32> {
        let is_it = |number: u32| self.chunk(number).is_some_and(|(chunk, at)| chunk.page(at) == page);
        let at = self.slot(hash, is_it)?;
        Some((self.shards[(hash >> (64 - SHARD_BITS)) as usize].slots[at] & NUMBER) - 1)
    }

    /// Add a page that is not there, with a state that is not 0.
    pub fn insert(&mut self, hash: u64, page: &Page, state: u32) -> u32 {
        let number = self.free_number();
        if let Some((chunk, at)) = self.chunk_mut(number) {
            let group = &mut chunk.groups[at / GROUP];
            (group.pages[at % GROUP], group.states[at % GROUP]) = (*page, state);
            chunk.used += 1;
            chunk.untouch(at);
        }
        self.used += 1;
        let shard = (hash >> (64 - SHARD_BITS)) as usize;
        let capacity = self.shards[shard].slots.len();
        if self.shards[shard].length >= capacity - capacity / 4 {
            self.resize(shard, larger(capacity));
        }
        let shard = &mut self.shards[shard];
        shard.put(hash, number);
        shard.length += 1;
        number
    }

    /// A place in the slab: the next one that is free, so that pages that come together lie together.
    fn free_number(&mut self) -> u32 {
        let free = self.end as usize - self.used;
        if free == 0 || free * FREE_SHARE < self.end as usize {
            let number = self.end;
            self.end += 1;
            self.next = self.end;
            self.make_chunk(number);
            return number;
        }
        loop {
            if self.next >= self.end {
                self.next = 0;
            }
            let number = self.next;
            self.next += 1;
            if self.state(number) == 0 {
                self.make_chunk(number);
                return number;
            }
        }
    }

    fn make_chunk(&mut self, number: u32) {
        let at = number as usize / CHUNK;
        if at == self.chunks.len() {
            self.chunks.push(None);
        }
        self.chunks[at].get_or_insert_with(Chunk::empty);
    }

    #[cold]
    fn resize(&mut self, shard: usize, capacity: usize) {
        let old = std::mem::replace(&mut self.shards[shard].slots, vec![0; capacity]);
        for (at, slot) in old.iter().enumerate() {
            if let Some(ahead) = old.get(at + AHEAD).filter(|slot| **slot != 0)
                && let Some((chunk, at)) = self.chunk((ahead & NUMBER) - 1)
            {
                chunk.prefetch(at);
            }
            if *slot != 0 {
                let number = (slot & NUMBER) - 1;
                let hash = self.hash_of(number);
                self.shards[shard].put(hash, number);
            }
        }
    }

    fn hash_of(&self, number: u32) -> u64 {
        self.hash(&self.page(number))
    }

    /// Take a page out.
    pub fn remove(&mut self, number: u32) {
        let hash = self.hash_of(number);
        let Some(mut hole) = self.slot(hash, |other| other == number) else { return };
        let shard = (hash >> (64 - SHARD_BITS)) as usize;
        let capacity = self.shards[shard].slots.len();
        let mut next = hole;
        loop {
            next = if next + 1 == capacity { 0 } else { next + 1 };
            let slot = self.shards[shard].slots[next];
            if slot == 0 {
                break;
            }
            let wanted = place(self.hash_of((slot & NUMBER) - 1), capacity);
            if may_move(wanted, next, hole) {
                self.shards[shard].slots[hole] = slot;
                hole = next;
            }
        }
        let slots = &mut self.shards[shard];
        slots.slots[hole] = 0;
        slots.length -= 1;
        if capacity > SMALLEST && slots.length * 4 < capacity {
            let fitting = slots.length + slots.length * 2 / 3;
            self.resize(shard, SMALLEST.max(fitting));
        }
        self.free(number);
    }

    fn free(&mut self, number: u32) {
        self.used -= 1;
        let Some((chunk, at)) = self.chunk_mut(number) else { return };
        chunk.groups[at / GROUP].states[at % GROUP] = 0;
        chunk.used -= 1;
        if chunk.used == 0 {
            self.chunks[number as usize / CHUNK] = None;
            while self.chunks.last().is_some_and(Option::is_none) {
                self.chunks.pop();
                self.end = self.end.min((self.chunks.len() * CHUNK) as u32);
            }
            self.chunks.shrink_to(2 * self.chunks.len());
        }
    }

    /// A page that nobody asked for since the hand passed it last: second chance, in the order of the slab.
    pub fn least_asked(&mut self) -> Option<u32> {
        if self.used == 0 {
            return None;
        }
        loop {
            if self.hand >= self.end {
                self.hand = 0;
            }
            let number = self.hand;
            self.hand += 1;
            let Some((chunk, at)) = self.chunk_mut(number) else {
                self.hand = (number / CHUNK as u32 + 1) * CHUNK as u32;
                continue;
            };
            if chunk.state(at) != 0 && !chunk.untouch(at) {
                return Some(number);
            }
        }
    }
}

impl Shard {
    #[inline]
    fn put(&mut self, hash: u64, number: u32) {
        let mut at = place(hash, self.slots.len());
        while self.slots[at] != 0 {
            at += 1;
            if at == self.slots.len() {
                at = 0;
            }
        }
        self.slots[at] = (number + 1) & NUMBER | hash as u32 & !NUMBER;
    }
}

impl Chunk {
    #[inline]
    fn touch(&self, from: usize, count: usize) {
        let mut at = from;
        while at < from + count {
            let bits = (GROUP - at % GROUP).min(from + count - at);
            let mask = (u32::MAX >> (32 - bits)) << (at % GROUP);
            let word = &self.groups[at / GROUP].touched;
            if word.load(Relaxed) & mask != mask {
                word.fetch_or(mask, Relaxed);
            }
            at += bits;
        }
    }

    /// Whether it was touched.
    #[inline]
    fn untouch(&mut self, at: usize) -> bool {
        let word = self.groups[at / GROUP].touched.get_mut();
        let bit = 1 << (at % GROUP);
        let was = *word & bit != 0;
        *word &= !bit;
        was
    }
}
