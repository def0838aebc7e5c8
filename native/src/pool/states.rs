//! What is present of a page, as a number: pages of one space of which the same is present have the same number.
//!
//! Most pages are in one of a handful of states, so that a page costs a number, whatever its objects are.

use std::collections::VecDeque;

use hashbrown::HashTable;

use crate::index::Keys;

/// States that nobody uses are kept for a while: most are soon needed again.
const IDLE: usize = 256;
const MOST_CACHED: usize = 4096;
/// What a state takes beside its objects, about.
const OVERHEAD: usize = 64;

/// An object of a page, a component, with the media that have it, a bit each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Object {
    pub component: u16,
    pub media: u8,
}

/// What happens to an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    Add(Object),
    Remove(Object),
}

#[derive(Clone, Copy)]
struct Step {
    from: u32,
    change: Change,
    version: u32,
    to: u32,
}

const NO_STEP: Step = Step { from: 0, change: Change::Add(Object { component: 0, media: 0 }), version: 0, to: 0 };

/// All states of a space. 0: nothing of the page is there.
pub struct States {
    keys: Keys,
    objects: Vec<Box<[Object]>>,
    uses: Vec<u32>,
    is_idle: Vec<bool>,
    numbers: HashTable<u32>,
    idle: VecDeque<u32>,
    free: Vec<u32>,
    bytes: usize,
    /// Counts whenever a number gets another meaning.
    version: u32,
    steps: Vec<Step>,
    buffer: Vec<Object>,
}

impl States {
    pub fn new(keys: Keys) -> Self {
        Self {
            keys,
            objects: vec![Box::default()],
            uses: vec![0],
            is_idle: vec![false],
            numbers: HashTable::new(),
            idle: VecDeque::new(),
            free: Vec::new(),
            bytes: 0,
            version: 1,
            steps: vec![NO_STEP; 16],
            buffer: Vec::new(),
        }
    }

    /// Bytes that states take.
    pub fn bytes(&self) -> usize {
        self.bytes + self.steps.capacity() * size_of::<Step>()
    }

    /// By component, ascending.
    #[inline]
    pub fn objects(&self, state: u32) -> &[Object] {
        &self.objects[state as usize]
    }

    /// Objects by number of the state; nothing where no page has it.
    pub fn used(&self) -> Vec<Box<[Object]>> {
        let all = self.objects.iter().zip(&self.uses);
        all.map(|(objects, uses)| if *uses > 0 { objects.clone() } else { Box::default() }).collect()
    }

    /// The state after a change of `from`. `None`: it is a new one, which would take more than `room` bytes.
    #[inline]
    pub fn step(&mut self, from: u32, change: Change, room: usize) -> Option<u32> {
        let (Change::Add(object) | Change::Remove(object)) = change;
        let key = u64::from(from) << 32 | u64::from(object.component) << 16 | u64::from(object.media) << 8;
        let key = key | u64::from(matches!(change, Change::Add(_)));
        let at = (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as usize & (self.steps.len() - 1);
        let cached = self.steps[at];
        if cached.version == self.version && cached.from == from && cached.change == change {
            return Some(cached.to);
        }
        let to = self.changed(from, change, room)?;
        if self.objects.len() > self.steps.len() / 4 && self.steps.len() < MOST_CACHED {
            self.steps = vec![NO_STEP; self.steps.len() * 4];
        } else {
            self.steps[at] = Step { from, change, version: self.version, to };
        }
        Some(to)
    }

    #[cold]
    fn changed(&mut self, from: u32, change: Change, room: usize) -> Option<u32> {
        let mut objects = std::mem::take(&mut self.buffer);
        objects.clear();
        objects.extend_from_slice(self.objects(from));
        let (Change::Add(object) | Change::Remove(object)) = change;
        let place = objects.binary_search_by_key(&object.component, |other| other.component);
        match (place, change) {
            (Ok(place), Change::Add(_)) => objects[place].media |= object.media,
            (Ok(place), Change::Remove(_)) => {
                objects[place].media &= !object.media;
                if objects[place].media == 0 {
                    objects.remove(place);
                }
            }
            (Err(place), Change::Add(_)) => objects.insert(place, object),
            (Err(_), Change::Remove(_)) => {}
        }
        let to = self.intern(&objects, room);
        self.buffer = objects;
        to
    }

    /// The state with these objects, by component, ascending.
    pub fn intern(&mut self, objects: &[Object], room: usize) -> Option<u32> {
        if objects.is_empty() {
            return Some(0);
        }
        let hash = hash_of(self.keys, objects);
        if let Some(number) = self.numbers.find(hash, |other| *self.objects[*other as usize] == *objects) {
            return Some(*number);
        }
        let size = size_of_val(objects) + OVERHEAD;
        if size > room {
            self.forget_idle(0);
            return None;
        }
        self.forget_idle(IDLE);
        let number = self.free.pop().unwrap_or_else(|| {
            self.objects.push(Box::default());
            self.uses.push(0);
            self.is_idle.push(false);
            self.objects.len() as u32 - 1
        });
        let at = number as usize;
        self.bytes += size;
        self.objects[at] = objects.into();
        self.is_idle[at] = true; // until somebody uses it
        self.idle.push_back(number);
        let (keys, all) = (self.keys, &self.objects);
        self.numbers.insert_unique(hash, number, |other| hash_of(keys, &all[*other as usize]));
        Some(number)
    }

    fn forget_idle(&mut self, kept: usize) {
        while self.idle.len() > kept {
            let Some(number) = self.idle.pop_front() else { break };
            self.is_idle[number as usize] = false;
            if self.uses[number as usize] == 0 {
                self.forget(number);
            }
        }
    }

    fn forget(&mut self, number: u32) {
        let at = number as usize;
        let objects = std::mem::take(&mut self.objects[at]);
        if let Ok(entry) = self.numbers.find_entry(hash_of(self.keys, &objects), |other| *other == number) {
            entry.remove();
        }
        self.bytes -= size_of_val(&*objects) + OVERHEAD;
        self.version = self.version.wrapping_add(1);
        self.free.push(number);
    }

    #[inline]
    pub fn acquire(&mut self, state: u32) {
        self.uses[state as usize] += 1;
    }

    #[inline]
    pub fn release(&mut self, state: u32) {
        let at = state as usize;
        self.uses[at] -= 1;
        if self.uses[at] == 0 && !self.is_idle[at] {
            self.is_idle[at] = true;
            self.idle.push_back(state);
        }
    }
}

fn hash_of(keys: Keys, objects: &[Object]) -> u64 {
    let value = |object: &Object| u64::from(object.component) << 8 | u64::from(object.media);
    objects.iter().fold(0, |hash, object| keys.mix(hash ^ value(object)).rotate_left(17))
}
