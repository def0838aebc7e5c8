//! The pages of one deployment in a pool: everything under one tenant, scheme and key prefix. See `kvcore/pool_space.py`.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use hashbrown::HashTable;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::keys::Scheme;
use super::pages::{Page, Pages};
use super::states::{Change, States};
use crate::index::Keys;

/// Bytes of the states of all spaces; a page that would need more goes.
pub const MAX_STATE_BYTES: usize = 256 << 20;

/// Who keeps these pages: tenant, scheme and key prefix.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity {
    pub tenant: Box<str>,
    pub scheme: Scheme,
    pub prefix: Box<str>,
}

/// Names, each with a number, in the order in which they came.
pub struct Names {
    all: Vec<Box<str>>,
    numbers: HashTable<u16>,
    seed: u64,
}

impl Names {
    pub fn new(keys: Keys) -> Self {
        Self { all: Vec::new(), numbers: HashTable::new(), seed: keys.mix(1) }
    }

    pub fn len(&self) -> usize {
        self.all.len()
    }

    pub fn all(&self) -> &[Box<str>] {
        &self.all
    }

    /// The number of a name that comes in two parts.
    #[inline]
    pub fn number(&self, name: [&str; 2]) -> Option<u16> {
        let [first, second] = name;
        if second.is_empty() {
            let hash = xxh3_64_with_seed(first.as_bytes(), self.seed);
            return self.numbers.find(hash, |number| *self.all[usize::from(*number)] == *first).copied();
        }
        let name = name.concat();
        self.number([&name, ""])
    }

    /// The number of a name that is not there.
    pub fn add(&mut self, name: [&str; 2]) -> u16 {
        let number = self.all.len() as u16;
        let name = name.concat();
        let (seed, all) = (self.seed, &self.all);
        let hash = xxh3_64_with_seed(name.as_bytes(), seed);
        self.numbers.insert_unique(hash, number, |other| xxh3_64_with_seed(all[usize::from(*other)].as_bytes(), seed));
        self.all.push(name.into());
        number
    }

    pub fn bytes(&self) -> usize {
        self.all.iter().map(|name| name.len() + 20).sum::<usize>() + self.numbers.allocation_size()
    }
}

/// One deployment.
pub struct Space {
    pub identity: Identity,
    /// Another for each that was ever made.
    pub serial: u64,
    pub components: Names,
    pub pages: Pages,
    pub states: States,
    pub objects: usize,
    /// Stored objects taken in.
    pub arrived: u64,
    /// Pages that matches found.
    pub matched: AtomicU64,
    /// When it was touched last.
    pub touched: AtomicU64,
}

/// What a change did; `Full`: there was no room for what would be known of the page, so that it went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Done {
    Changed,
    Unchanged,
    Full,
}

impl Space {
    pub fn new(identity: Identity, serial: u64, keys: Keys) -> Self {
        Self {
            identity,
            serial,
            components: Names::new(keys),
            pages: Pages::new(keys),
            states: States::new(keys),
            objects: 0,
            arrived: 0,
            matched: AtomicU64::new(0),
            touched: AtomicU64::new(0),
        }
    }

    pub fn bytes(&self) -> usize {
        let identity = self.identity.tenant.len() + self.identity.prefix.len();
        size_of::<Self>() + identity + self.components.bytes() + self.pages.bytes() + self.states.bytes()
    }

    /// Change one object of a page. `room`: bytes that another state may take.
    #[inline]
    pub fn change(&mut self, hash: u64, page: &Page, change: Change, room: usize) -> Done {
        let number = self.pages.find(hash, page);
        let from = number.map_or(0, |number| self.pages.state(number));
        let Some(to) = self.states.step(from, change, room) else {
            if let Some(number) = number {
                self.forget(number);
            }
            return Done::Full;
        };
        let stores = matches!(change, Change::Add(_));
        if let Some(number) = number.filter(|_| stores) {
            self.pages.touch(number);
        }
        if to == from {
            return Done::Unchanged;
        }
        self.states.acquire(to);
        let before = self.states.objects(from).len();
        self.objects = self.objects + self.states.objects(to).len() - before;
        match number {
            None => {
                self.pages.insert(hash, page, to);
            }
            Some(number) => {
                self.states.release(from);
                if to == 0 {
                    self.pages.remove(number);
                } else {
                    self.pages.change(number, to);
                }
            }
        }
        Done::Changed
    }

    /// Forget a page.
    fn forget(&mut self, number: u32) {
        let state = self.pages.state(number);
        self.objects -= self.states.objects(state).len();
        self.states.release(state);
        self.pages.remove(number);
    }

    /// Forget `count` pages that were not touched for long.
    pub fn evict(&mut self, count: usize) {
        for _ in 0..count {
            let Some(number) = self.pages.least_asked() else { return };
            self.forget(number);
        }
    }

    pub fn has(&self, page: &Page) -> bool {
        self.pages.find(self.pages.hash(page), page).is_some()
    }

    /// The media of one object, a bit each.
    pub fn media(&self, page: &Page, component: [&str; 2]) -> u8 {
        let Some(component) = self.components.number(component) else { return 0 };
        let Some(number) = self.pages.find(self.pages.hash(page), page) else { return 0 };
        let objects = self.states.objects(self.pages.state(number));
        objects.iter().find(|object| object.component == component).map_or(0, |object| object.media)
    }

    pub fn touch(&self, now: u64) {
        self.touched.store(now, Relaxed);
    }
}
