//! Pictures of an index, and what is made of them without stopping anybody: dumps, and what two indexes differ in.

use std::collections::HashMap;

use super::format::{DELTA, DUMP, Section, write};
use super::index::PoolIndex;
use super::pages::{Page, Picture};
use super::space::{Identity, Space};
use super::states::Object;

const STEP: u32 = 8192;
const AHEAD: usize = 32;

/// One deployment as it was.
struct SpacePicture {
    identity: Identity,
    components: Vec<Box<str>>,
    /// By number; nothing where no page has it.
    states: Vec<Box<[Object]>>,
    pages: Picture,
}

impl SpacePicture {
    fn new(space: &Space) -> Self {
        Self {
            identity: space.identity.clone(),
            components: space.components.all().to_vec(),
            states: space.states.used(),
            pages: space.pages.picture(),
        }
    }

    fn objects(&self, state: u32) -> Vec<(&str, u8)> {
        described(&self.components, &self.states[state as usize])
    }
}

fn described<'a>(components: &'a [Box<str>], objects: &[Object]) -> Vec<(&'a str, u8)> {
    objects.iter().map(|object| (&*components[usize::from(object.component)], object.media)).collect()
}

/// A dump that is being written, some pages a step.
pub struct Dumper {
    media: Vec<Box<str>>,
    todo: std::vec::IntoIter<SpacePicture>,
    sections: Vec<Section>,
    current: Option<Current>,
}

struct Current {
    space: SpacePicture,
    /// Of each state; `u32::MAX`: no page has it.
    patterns: Vec<u32>,
    at: u32,
    /// Pages that nobody asked for since the clock's hand passed come first.
    touched: bool,
}

impl Dumper {
    /// Takes the picture.
    pub fn new(index: &PoolIndex) -> Self {
        let spaces: Vec<_> = index.spaces().into_iter().map(SpacePicture::new).collect();
        Self { media: index.media().to_vec(), todo: spaces.into_iter(), sections: Vec::new(), current: None }
    }

    /// Some pages more; the bytes after the last.
    pub fn step(&mut self) -> Option<Vec<u8>> {
        let Some(current) = &mut self.current else {
            let Some(space) = self.todo.next() else {
                let sections = std::mem::take(&mut self.sections);
                return Some(write(DUMP, &self.media, &sections));
            };
            let mut section = Section::new(&space.identity, space.pages.length);
            let number = |state: usize| {
                if space.states[state].is_empty() { u32::MAX } else { section.pattern(&space.objects(state as u32)) }
            };
            let patterns = (0..space.states.len()).map(number).collect();
            self.sections.push(section);
            self.current = Some(Current { space, patterns, at: 0, touched: false });
            return None;
        };
        let section = self.sections.last_mut()?;
        let pages = &current.space.pages;
        let stop = pages.end().min(current.at + STEP);
        for place in current.at..stop {
            if let Some((page, state, touched)) = pages.entry(place)
                && touched == current.touched
            {
                section.page(page, current.patterns[state as usize]);
            }
        }
        current.at = stop;
        if stop == pages.end() {
            if current.touched {
                self.current = None;
            } else {
                (current.at, current.touched) = (0, true);
            }
        }
        None
    }
}

/// Deltas after which an index holds the same objects as `target`.
pub struct Difference {
    tenant: Option<String>,
    part_bytes: usize,
    own: Vec<SpacePicture>,
}

impl Difference {
    /// Takes the picture of the index that is to change.
    pub fn new(own: &PoolIndex, tenant: Option<String>, part_bytes: usize) -> Self {
        let wanted = |space: &&Space| tenant.as_ref().is_none_or(|tenant| **tenant == *space.identity.tenant);
        let own = own.spaces().into_iter().filter(wanted).map(SpacePicture::new).collect();
        Self { tenant, part_bytes, own }
    }

    pub fn deltas(self, target: &PoolIndex) -> Vec<Vec<u8>> {
        let mut writer = Writer {
            media: target.media(),
            part_bytes: self.part_bytes,
            sections: Vec::new(),
            closed: 0,
            parts: Vec::new(),
        };
        let mut theirs: HashMap<&Identity, &Space> = HashMap::new();
        for space in target.spaces() {
            if self.tenant.as_ref().is_none_or(|tenant| **tenant == *space.identity.tenant) {
                theirs.insert(&space.identity, space);
            }
        }
        for own in &self.own {
            let their = theirs.remove(&own.identity);
            writer.open(&own.identity);
            compare(own, their, &mut writer);
        }
        for their in target.spaces().into_iter().filter(|space| theirs.contains_key(&space.identity)) {
            writer.open(&their.identity);
            let mut pairs = Pairs { own: None, their: Some(their), numbers: HashMap::new() };
            let pages = their.pages.picture();
            for (page, state, _) in (0..pages.end()).filter_map(|place| pages.entry(place)) {
                writer.add(page, (0, state), &mut pairs);
            }
        }
        writer.cut();
        writer.parts
    }
}

fn compare(own: &SpacePicture, their: Option<&Space>, writer: &mut Writer<'_>) {
    let mut pairs = Pairs { own: Some(own), their, numbers: HashMap::new() };
    let their_pages = their.map(|their| their.pages.picture());
    let theirs_end = their_pages.as_ref().map_or(0, Picture::end) as usize;
    let mut seen = vec![0u64; theirs_end.div_ceil(64)];
    let mut block = Vec::with_capacity(AHEAD);
    let mut place = 0;
    while place < own.pages.end() {
        let stop = own.pages.end().min(place + AHEAD as u32);
        block.clear();
        block.extend((place..stop).filter_map(|place| own.pages.entry(place)).map(|(page, state, _)| {
            let hash = their.map_or(0, |their| their.pages.hash(page));
            if let Some(their) = their {
                their.pages.prefetch(hash);
            }
            (page, state, hash)
        }));
        if let Some(their) = their {
            for (_, _, hash) in &block {
                their.pages.prefetch_page(*hash);
            }
        }
        for (page, state, hash) in &block {
            let mut there = 0;
            if let Some(their) = their
                && let Some(number) = their.pages.find(*hash, page)
            {
                there = their.pages.state(number);
                seen[number as usize / 64] |= 1 << (number % 64);
            }
            writer.add(page, (*state, there), &mut pairs);
        }
        place = stop;
    }
    for (number, page, state) in their_pages.iter().flat_map(Picture::numbered) {
        if seen[number as usize / 64] >> (number % 64) & 1 == 0 {
            writer.add(page, (0, state), &mut pairs);
        }
    }
}

/// States here and there, and the pattern of what changes; `None`: nothing does.
struct Pairs<'a> {
    own: Option<&'a SpacePicture>,
    their: Option<&'a Space>,
    numbers: HashMap<(u32, u32), Option<u32>>,
}

impl Pairs<'_> {
    fn changes(&self, (own, their): (u32, u32)) -> Vec<(&str, u8)> {
        let here = self.own.filter(|_| own != 0).map(|space| space.objects(own)).unwrap_or_default();
        let there = self
            .their
            .filter(|_| their != 0)
            .map(|space| described(space.components.all(), space.states.objects(their)));
        let there = there.unwrap_or_default();
        let has = |objects: &[(&str, u8)], name: &str| objects.iter().any(|(other, _)| *other == name);
        let gone = here.iter().filter(|(name, _)| !has(&there, name)).map(|(name, _)| (*name, 0));
        gone.chain(there.iter().filter(|(name, _)| !has(&here, name)).copied()).collect()
    }
}

struct Writer<'a> {
    media: &'a [Box<str>],
    part_bytes: usize,
    sections: Vec<(Identity, Section)>,
    /// Bytes of all sections but the last.
    closed: usize,
    parts: Vec<Vec<u8>>,
}

impl Writer<'_> {
    fn open(&mut self, identity: &Identity) {
        if self.sections.last().is_some_and(|(_, section)| section.is_empty()) {
            self.sections.pop();
        }
        self.closed = self.sections.iter().map(|(_, section)| section.size()).sum();
        self.sections.push((identity.clone(), Section::new(identity, 0)));
    }

    fn add(&mut self, page: &Page, states: (u32, u32), pairs: &mut Pairs<'_>) {
        let Some((identity, section)) = self.sections.last_mut() else { return };
        let number = if let Some(number) = pairs.numbers.get(&states) {
            *number
        } else {
            let changes = pairs.changes(states);
            let number = (!changes.is_empty()).then(|| section.pattern(&changes));
            pairs.numbers.insert(states, number);
            number
        };
        let Some(number) = number else { return };
        section.page(page, number);
        if self.closed + section.size() >= self.part_bytes {
            let identity = identity.clone();
            self.cut();
            self.open(&identity);
            pairs.numbers.clear();
        }
    }

    fn cut(&mut self) {
        let sections: Vec<_> = std::mem::take(&mut self.sections).into_iter().map(|(_, section)| section).collect();
        if sections.iter().any(|section| !section.is_empty()) {
            self.parts.push(write(DELTA, self.media, &sections));
        }
        self.closed = 0;
    }
}
