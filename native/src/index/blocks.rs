//! The blocks of one group, by engine hash.
//!
//! A block is a record of 32 bytes in a slab, half a cache line. Several engine hashes may name one block: the first has the record itself,
//! each other one a record that stands for a name only and says which block it means.

use std::collections::HashMap;

use super::table::{EngineTable, Keys, prefetch};

/// 16 bits a tier, the device lowest: how often each tier holds the block.
pub type Copies = u64;

/// Most copies that are counted in one tier.
pub const MOST: u64 = 0xffff;
const TIER_BITS: usize = 16;
const CHUNK: usize = 256;
/// Copies that do not fit four bits a tier: they stand in `Blocks::many`.
const MANY: u16 = u16::MAX;
/// Children that do not fit 16 bits: they stand in `Blocks::many_children`.
const MANY_CHILDREN: i16 = i16::MIN;
/// How far ahead free records are asked for.
const FREE_AHEAD: usize = 4;
/// Names behind one that is to be forgotten whose blocks are asked for: it leaves a gap, into which they may move.
const CLUSTER: usize = 8;

const HAS_OWN: u32 = 1 << 26;
const HAS_PARENT: u32 = 1 << 27;
/// Stands for a name only; `own` is the number of its block.
const IS_NAME: u32 = 1 << 28;
/// Its engine hash is in the table.
const IS_NAMED: u32 = 1 << 29;
/// Has, or had, several names: see `Blocks::names`.
const IS_SHARED: u32 = 1 << 30;
const IS_USED: u32 = 1 << 31;
const SEED: u32 = HAS_OWN - 1;

/// Best tier with a copy; `copies` is not 0.
#[inline]
pub fn best_tier(copies: Copies) -> usize {
    copies.trailing_zeros() as usize / TIER_BITS
}

#[inline]
pub fn copies_in(copies: Copies, tier: usize) -> u64 {
    copies >> (tier * TIER_BITS) & MOST
}

/// One copy in `tier`.
#[inline]
pub fn one_in(tier: usize) -> Copies {
    1 << (tier * TIER_BITS)
}

/// All copies that a tier may have.
pub fn all_in(tier: usize) -> Copies {
    MOST << (tier * TIER_BITS)
}

#[derive(Clone, Copy, Default)]
#[repr(C, align(32))]
struct Record {
    own: u64,
    engine: u64,
    parent: u64,
    copies: u16,
    children: i16,
    flags: u32, // and the seed's number
}

/// What a block is: its chain hash, the seed of its namespace, and the engine hash before it.
#[derive(Clone, Copy)]
pub struct Identity {
    pub own: u64,
    pub seed: u64,
    pub parent: Option<u64>,
}

/// Seeds of the local hashes, each once, counted.
#[derive(Default)]
pub struct Seeds {
    values: Vec<(u64, u32)>,
    numbers: HashMap<u64, u32>,
    free: Vec<u32>,
    last: u32,
}

impl Seeds {
    fn acquire(&mut self, seed: u64) -> u32 {
        if let Some((value, uses)) = self.values.get_mut(self.last as usize)
            && *value == seed
            && *uses > 0
        {
            *uses += 1;
            return self.last;
        }
        let number = *self.numbers.entry(seed).or_insert_with(|| {
            self.free.pop().unwrap_or_else(|| {
                self.values.push((0, 0));
                self.values.len() as u32 - 1
            })
        });
        let (value, uses) = &mut self.values[number as usize];
        *value = seed;
        *uses += 1;
        self.last = number;
        number
    }

    fn release(&mut self, number: u32) {
        let (value, uses) = &mut self.values[number as usize];
        *uses -= 1;
        if *uses == 0 {
            self.numbers.remove(value);
            self.free.push(number);
        }
    }
}

/// All blocks of one group.
pub struct Blocks {
    chunks: Vec<Box<[Record; CHUNK]>>,
    /// Numbers given out so far, free ones included.
    end: u32,
    free: Vec<u32>,
    table: EngineTable,
    seeds: Seeds,
    many: HashMap<u32, Copies>,
    many_children: HashMap<u32, i32>,
    /// How many names a shared block has.
    names: HashMap<u32, u32>,
    keys: Keys,
}

impl Blocks {
    pub fn new(keys: Keys) -> Self {
        Self {
            chunks: Vec::new(),
            end: 0,
            free: Vec::new(),
            table: EngineTable::new(keys),
            seeds: Seeds::default(),
            many: HashMap::new(),
            many_children: HashMap::new(),
            names: HashMap::new(),
            keys,
        }
    }

    /// Others, empty.
    pub fn empty(&self) -> Self {
        Self::new(self.keys)
    }

    /// Engine hashes in all.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Numbers run to here; some may be free.
    pub fn end(&self) -> u32 {
        self.end
    }

    /// Bytes that the blocks and their table take.
    pub fn bytes(&self) -> usize {
        let maps = self.many.capacity() * 17
            + (self.names.capacity() + self.many_children.capacity()) * 9
            + self.seeds.values.capacity() * 33;
        self.chunks.len() * CHUNK * size_of::<Record>() + self.free.capacity() * 4 + self.table.bytes() + maps
    }

    #[inline]
    fn record(&self, number: u32) -> &Record {
        &self.chunks[number as usize / CHUNK][number as usize % CHUNK]
    }

    #[inline]
    fn record_mut(&mut self, number: u32) -> &mut Record {
        &mut self.chunks[number as usize / CHUNK][number as usize % CHUNK]
    }

    // Names

    #[inline]
    fn name(&self, engine: u64) -> Option<u32> {
        self.table.get(engine, |number| self.record(number).engine)
    }

    #[inline]
    fn behind(&self, name: u32) -> u32 {
        let record = self.record(name);
        if record.flags & IS_NAME == 0 { name } else { record.own as u32 }
    }

    /// The block of an engine hash.
    #[inline]
    pub fn get(&self, engine: u64) -> Option<u32> {
        self.name(engine).map(|name| self.behind(name))
    }

    /// The engine hash and the block of a number, if it stands for a name: what a walk from 0 to `end` looks at.
    pub fn named(&self, number: u32) -> Option<(u64, u32)> {
        let record = self.record(number);
        (record.flags & IS_NAMED != 0).then(|| (record.engine, self.behind(number)))
    }

    /// Whether the number is that of a block, not of a name.
    pub fn is_block(&self, number: u32) -> bool {
        self.record(number).flags & (IS_USED | IS_NAME) == IS_USED
    }

    #[inline]
    pub fn prefetch_name(&self, engine: u64) {
        self.table.prefetch(engine);
    }

    /// Ask for the record that is likely to be that of `engine`.
    #[inline]
    pub fn prefetch_block(&self, engine: u64) {
        if let Some(number) = self.table.guess(engine) {
            prefetch(self.record(number));
        }
    }

    /// The chain hash that is likely to be that of `engine`.
    #[inline]
    pub fn guess_own(&self, engine: u64) -> Option<u64> {
        self.table.guess(engine).map(|number| self.record(number).own)
    }

    /// Ask for what forgetting the name is likely to look at: its block was asked for before.
    #[inline]
    pub fn prefetch_forget(&self, engine: u64) {
        self.table.behind(engine, CLUSTER, |number| prefetch(self.record(number)));
    }

    fn new_record(&mut self, record: Record) -> u32 {
        if let Some(&ahead) = self.free.len().checked_sub(FREE_AHEAD).and_then(|at| self.free.get(at)) {
            prefetch(self.record(ahead));
        }
        let number = self.free.pop().unwrap_or_else(|| {
            if self.end as usize == self.chunks.len() * CHUNK {
                self.chunks.push(Box::new([Record::default(); CHUNK]));
            }
            self.end += 1;
            self.end - 1
        });
        *self.record_mut(number) = record;
        number
    }

    /// Into the table; the record says already that it is named.
    fn insert(&mut self, engine: u64, number: u32) {
        if self.table.is_full() {
            // In the order of the records, so that they are read one after the other.
            let (chunks, end) = (&self.chunks, self.end as usize);
            let records = chunks.iter().flat_map(|chunk| chunk.iter()).take(end).zip(0..);
            let named = records.filter(|(record, other)| record.flags & IS_NAMED != 0 && *other != number);
            self.table.grow(named.map(|(record, other)| (record.engine, other)));
        }
        self.table.insert(engine, number);
    }

    /// A block without an identity under an engine hash that names none.
    pub fn add_nameless(&mut self, engine: u64) -> u32 {
        let number = self.new_record(Record { engine, flags: IS_USED | IS_NAMED, ..Record::default() });
        self.insert(engine, number);
        number
    }

    /// A block under an engine hash that names none. `seed` is from `lend_seed`.
    #[inline]
    pub fn add(&mut self, engine: u64, own: u64, seed: u32, parent: Option<u64>, tier: Option<usize>) -> u32 {
        let flags = IS_USED | IS_NAMED | HAS_OWN | seed | if parent.is_some() { HAS_PARENT } else { 0 };
        let copies = tier.map_or(0, |tier| 1 << (tier * 4));
        self.seeds.values[seed as usize].1 += 1;
        let number = self.new_record(Record { own, engine, parent: parent.unwrap_or(0), copies, children: 0, flags });
        self.insert(engine, number);
        number
    }

    /// A block without a name yet: `name_it` must follow.
    pub fn add_unnamed(&mut self, identity: Option<Identity>) -> u32 {
        let mut record = Record { flags: IS_USED, ..Record::default() };
        if let Some(Identity { own, seed, parent }) = identity {
            record.own = own;
            record.parent = parent.unwrap_or(0);
            record.flags |= HAS_OWN | self.seeds.acquire(seed) | if parent.is_some() { HAS_PARENT } else { 0 };
        }
        self.new_record(record)
    }

    /// Let an engine hash that names nothing name this block.
    pub fn name_it(&mut self, engine: u64, block: u32) {
        let record = self.record_mut(block);
        if record.flags & (IS_NAMED | IS_SHARED) == 0 {
            record.engine = engine;
            record.flags |= IS_NAMED;
            return self.insert(engine, block);
        }
        let named = u32::from(record.flags & IS_NAMED != 0);
        record.flags |= IS_SHARED;
        *self.names.entry(block).or_insert(named) += 1;
        let flags = IS_USED | IS_NAMED | IS_NAME;
        let name = self.new_record(Record { own: block.into(), engine, flags, ..Record::default() });
        self.insert(engine, name);
    }

    /// Take an engine hash away; the block goes with its last name.
    pub fn forget(&mut self, engine: u64) {
        let Some(name) = self.name(engine) else { return };
        let chunks = &self.chunks;
        self.table.remove(engine, |number| chunks[number as usize / CHUNK][number as usize % CHUNK].engine);
        let block = self.behind(name);
        if name == block {
            self.record_mut(name).flags &= !IS_NAMED;
        } else {
            *self.record_mut(name) = Record::default();
            self.free.push(name);
        }
        if self.record(block).flags & IS_SHARED != 0 {
            let left = self.names.entry(block).or_insert(1);
            *left -= 1;
            if *left > 0 {
                return;
            }
            self.names.remove(&block);
        }
        self.drop_block(block);
    }

    /// Give a block back that has no name (any more).
    pub fn drop_block(&mut self, block: u32) {
        self.drop_seed(block);
        let record = *self.record(block);
        if record.copies == MANY {
            self.many.remove(&block);
        }
        if record.children == MANY_CHILDREN {
            self.many_children.remove(&block);
        }
        *self.record_mut(block) = Record::default();
        self.free.push(block);
    }

    // Identity

    /// Number of a seed, for blocks to come; `return_seed` it afterwards.
    pub fn lend_seed(&mut self, seed: u64) -> u32 {
        self.seeds.acquire(seed)
    }

    #[inline]
    pub fn return_seed(&mut self, number: u32) {
        self.seeds.release(number);
    }

    fn drop_seed(&mut self, block: u32) {
        let flags = self.record(block).flags;
        if flags & HAS_OWN != 0 {
            self.seeds.release(flags & SEED);
        }
    }

    /// Chain hash, `None` until known.
    #[inline]
    pub fn own(&self, block: u32) -> Option<u64> {
        let record = self.record(block);
        (record.flags & HAS_OWN != 0).then_some(record.own)
    }

    #[inline]
    pub fn parent(&self, block: u32) -> Option<u64> {
        let record = self.record(block);
        (record.flags & HAS_PARENT != 0).then_some(record.parent)
    }

    pub fn seed(&self, block: u32) -> u64 {
        let flags = self.record(block).flags;
        if flags & HAS_OWN != 0 { self.seeds.values[(flags & SEED) as usize].0 } else { 0 }
    }

    /// Whether its seed is the one of this number.
    #[inline]
    pub fn has_seed(&self, block: u32, seed: u32) -> bool {
        let flags = self.record(block).flags;
        flags & HAS_OWN != 0 && flags & SEED == seed
    }

    /// Give a block without identity its own. `seed` is from `lend_seed`.
    pub fn identify(&mut self, block: u32, own: u64, seed: u32, parent: Option<u64>) {
        self.seeds.values[seed as usize].1 += 1;
        let record = self.record_mut(block);
        record.own = own;
        record.parent = parent.unwrap_or(0);
        record.flags |= HAS_OWN | seed | if parent.is_some() { HAS_PARENT } else { 0 };
    }

    // Copies and children

    #[inline]
    pub fn is_resident(&self, block: u32) -> bool {
        self.record(block).copies != 0
    }

    #[inline]
    pub fn copies(&self, block: u32) -> Copies {
        let copies = self.record(block).copies;
        if copies == MANY {
            return self.many.get(&block).copied().unwrap_or(0);
        }
        let copies = u64::from(copies);
        copies & 0xf | (copies & 0xf0) << 12 | (copies & 0xf00) << 24 | (copies & 0xf000) << 36
    }

    #[inline]
    pub fn set_copies(&mut self, block: u32, copies: Copies) {
        let record = &mut self.chunks[block as usize / CHUNK][block as usize % CHUNK];
        if record.copies == MANY {
            self.many.remove(&block);
        }
        let packed = (copies & 0xf | copies >> 12 & 0xf0 | copies >> 24 & 0xf00 | copies >> 36 & 0xf000) as u16;
        record.copies = packed;
        if copies & 0xfff0_fff0_fff0_fff0 != 0 || packed == MANY {
            record.copies = MANY;
            self.many.insert(block, copies);
        }
    }

    /// Resident blocks that name it as parent.
    #[inline]
    pub fn children(&self, block: u32) -> i32 {
        match self.record(block).children {
            MANY_CHILDREN => self.many_children.get(&block).copied().unwrap_or(0),
            children => children.into(),
        }
    }

    #[inline]
    pub fn add_children(&mut self, block: u32, count: i32) {
        let children = self.children(block).wrapping_add(count);
        let record = &mut self.chunks[block as usize / CHUNK][block as usize % CHUNK];
        let was_many = record.children == MANY_CHILDREN;
        match i16::try_from(children) {
            Ok(few) if few != MANY_CHILDREN => {
                record.children = few;
                if was_many {
                    self.many_children.remove(&block);
                }
            }
            _ => {
                record.children = MANY_CHILDREN;
                self.many_children.insert(block, children);
            }
        }
    }

    // Memory

    /// Whether most of what was taken is not used.
    pub fn is_sparse(&self) -> bool {
        self.chunks.len() > 16 && (self.end as usize - self.free.len()) * 4 < self.end as usize
    }

    /// Copy what is used to as little memory as it takes; the new number of each old one.
    pub fn compact(&mut self) -> Vec<u32> {
        let mut new = Self::new(self.keys);
        let mut numbers = vec![u32::MAX; self.end as usize];
        for old in 0..self.end {
            let record = *self.record(old);
            if record.flags & IS_USED != 0 {
                numbers[old as usize] = new.new_record(record);
            }
        }
        for number in 0..new.end {
            let record = new.record_mut(number);
            if record.flags & IS_NAME != 0 {
                record.own = numbers[record.own as usize].into();
            }
        }
        let records = new.chunks.iter().flat_map(|chunk| chunk.iter()).take(new.end as usize).zip(0..);
        let named = records.filter(|(record, _)| record.flags & IS_NAMED != 0);
        let named = named.map(|(record, number)| (record.engine, number));
        new.table = EngineTable::of(self.keys, self.table.len(), named);
        let renamed = |(old, value): (&u32, &u32)| (numbers[*old as usize], *value);
        new.names = self.names.iter().map(renamed).collect();
        new.many = self.many.iter().map(|(old, copies)| (numbers[*old as usize], *copies)).collect();
        new.many_children = self.many_children.iter().map(|(old, count)| (numbers[*old as usize], *count)).collect();
        new.seeds = std::mem::take(&mut self.seeds);
        *self = new;
        numbers
    }
}
