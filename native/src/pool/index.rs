//! What lies in a shared pool: see `kvcore/pool_index.py`, whose rules these are.

use std::cmp::Reverse;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use hashbrown::HashTable;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::events::{Kind, PoolEvent, Reason, decode_pool_batch};
use super::format::{BAD_PAGES, File, Part};
use super::keys::{Key, Scheme, parse};
use super::matching::Layout;
use super::page_hash::PAGE_BYTES;
use super::pages::{MAX_PAGES, Page};
use super::space::{Done, Identity, MAX_STATE_BYTES, Space};
use super::states::{Change, Object};
use crate::index::Keys;

pub const DEFAULT_TENANT: &str = "default";
const MAX_COMPONENTS_IN_ALL: usize = 65_536;
pub const MAX_MEDIA: usize = 8;
const CPU: u8 = 1;
/// Media that have a name that we know: cpu and disk.
const KNOWN_MEDIA: usize = 2;
/// Pages that there may be beyond the bound within one call.
pub const SLACK: usize = 2048;
/// No space.
const NOWHERE: u32 = u32::MAX;
/// Of how many spaces it is kept that they were touched longest ago.
const OLDEST_KNOWN: usize = 256;

#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub pages: usize,
    pub prefixes: usize,
    pub components: usize,
    pub key_bytes: usize,
}

/// What one call did, or all of them: see `kvcore.pool_index.PoolApplied`.
#[derive(Debug, Default, Clone, Copy)]
pub struct Applied {
    pub stored: usize,
    pub removed: usize,
    pub unchanged: usize,
    pub cleared: usize,
    pub unparsed: usize,
    pub unknown_media: usize,
    pub evicted: usize,
    pub rejected: [usize; Reason::ALL.len()],
}

impl Applied {
    pub fn reject(&mut self, reason: Reason) {
        self.rejected[reason as usize] += 1;
    }
}

pub struct PoolIndex {
    pub limits: Limits,
    keys: Keys,
    media: Vec<Box<str>>,
    spaces: Vec<Option<Box<Space>>>,
    numbers: HashTable<u32>,
    free: Vec<u32>,
    /// Spaces that were touched longest ago, the oldest one last; those that were touched since do not count.
    oldest: Vec<(u64, u32)>,
    /// The one that an event named last.
    last: u32,
    /// That of the space made last. An index begins anywhere: the one that `replace` takes over has none of this one's.
    serial: u64,
    now: AtomicU64,
    pages: usize,
    components: usize,
    state_bytes: usize,
    /// Since the start.
    pub total: Applied,
    pub backend_id: Option<String>,
    /// Evicted so far within a call.
    evicted: usize,
}

fn hash_of(keys: Keys, tenant: &str, scheme: Scheme, prefix: &str) -> u64 {
    let seed = xxh3_64_with_seed(prefix.as_bytes(), keys.mix(scheme as u64));
    xxh3_64_with_seed(tenant.as_bytes(), seed)
}

impl PoolIndex {
    pub fn new(limits: Limits) -> Self {
        let limits = Limits {
            pages: limits.pages.clamp(1, MAX_PAGES - MAX_PAGES / 16),
            prefixes: limits.prefixes.max(1),
            components: limits.components.min(usize::from(u16::MAX)),
            ..limits
        };
        let keys = Keys::random();
        Self {
            limits,
            keys,
            media: vec!["cpu".into(), "disk".into()],
            spaces: Vec::new(),
            numbers: HashTable::new(),
            free: Vec::new(),
            oldest: Vec::new(),
            last: NOWHERE,
            serial: keys.mix(0),
            now: AtomicU64::new(1),
            pages: 0,
            components: 0,
            state_bytes: 0,
            total: Applied::default(),
            backend_id: None,
            evicted: 0,
        }
    }

    // Writing

    /// Apply a master's message; the error is a sentence, and nothing is changed.
    pub fn apply_payload(&mut self, payload: &[u8]) -> Result<Applied, String> {
        let batch = decode_pool_batch(payload, self.limits.key_bytes)?;
        let mut applied = Applied::default();
        if let Some(backend_id) = batch.backend_id.filter(|name| self.backend_id.as_deref() != Some(*name)) {
            self.backend_id = Some(backend_id.to_owned());
        }
        for event in &batch.events {
            match event {
                Ok(event) => self.apply(event, &mut applied),
                Err(reason) => applied.reject(*reason),
            }
        }
        Ok(self.finish(applied))
    }

    fn apply(&mut self, event: &PoolEvent<'_>, applied: &mut Applied) {
        if event.kind == Kind::Cleared {
            applied.cleared += 1;
            return self.clear(Some(event.tenant));
        }
        let Some(key) = parse(event.key, self.limits.key_bytes) else {
            applied.unparsed += 1;
            return;
        };
        if event.kind == Kind::Stored {
            let Some(medium) = self.medium(event.medium) else { return applied.reject(Reason::TooManyMedia) };
            if self.store(event.tenant, &key, 1 << medium, applied) && medium >= KNOWN_MEDIA {
                applied.unknown_media += 1;
            }
        } else {
            self.remove(event, &key, applied);
        }
    }

    /// The number of a medium in any case, a new one if it must be; without a name that of cpu.
    fn medium(&mut self, name: &str) -> Option<usize> {
        match name {
            "" | "cpu" => return Some(0),
            "disk" => return Some(1),
            _ => {}
        }
        self.known_medium(name).or_else(|| {
            (self.media.len() < MAX_MEDIA).then(|| {
                self.media.push(name.to_ascii_lowercase().into());
                self.media.len() - 1
            })
        })
    }

    fn known_medium(&self, name: &str) -> Option<usize> {
        let lower = || name.bytes().map(|byte| byte.to_ascii_lowercase());
        self.media.iter().position(|medium| medium.bytes().eq(lower()))
    }

    /// Media of another index or of a file in this one's numbers; those for which there is no room are left out.
    fn numbered(&mut self, names: &[impl AsRef<str>], media: u8) -> u8 {
        let mut numbered = 0;
        for (_, name) in names.iter().enumerate().filter(|(place, _)| media >> place & 1 == 1) {
            let known = self.media.iter().position(|medium| **medium == *name.as_ref());
            if let Some(number) = known {
                numbered |= 1 << number;
            } else if self.media.len() < MAX_MEDIA {
                numbered |= 1 << self.media.len();
                self.media.push(name.as_ref().into());
            }
        }
        numbered
    }

    /// Take in one object; whether there was room.
    fn store(&mut self, tenant: &str, key: &Key<'_>, media: u8, applied: &mut Applied) -> bool {
        let number = self.make_space(tenant, key.scheme, key.prefix);
        let Some(component) = self.component(number, key.component) else {
            applied.reject(Reason::TooManyComponents);
            self.drop_if_empty(number);
            return false;
        };
        let done = self.change(number, &key.page, Change::Add(Object { component, media }));
        if let Some(space) = &mut self.spaces[number as usize] {
            space.arrived += 1;
        }
        applied.stored += usize::from(done == Done::Changed);
        applied.unchanged += usize::from(done != Done::Changed);
        self.make_room(number, SLACK);
        if done == Done::Full {
            self.drop_if_empty(number);
        }
        true
    }

    fn remove(&mut self, event: &PoolEvent<'_>, key: &Key<'_>, applied: &mut Applied) {
        let medium = if event.medium.is_empty() { Some(None) } else { self.known_medium(event.medium).map(Some) };
        applied.unknown_media += usize::from(!matches!(medium, Some(None | Some(0..KNOWN_MEDIA))));
        let media = medium.map_or(0, |medium| medium.map_or(u8::MAX, |medium| 1 << medium));
        let number = self.find_space(event.tenant, key.scheme, key.prefix);
        let mut done = Done::Unchanged;
        if let Some(space) = self.space(number).filter(|_| media != 0)
            && let Some(component) = space.components.number(key.component)
        {
            done = self.change(number, &key.page, Change::Remove(Object { component, media }));
            if done == Done::Changed {
                self.drop_if_empty(number);
            }
        }
        applied.removed += usize::from(done == Done::Changed);
        applied.unchanged += usize::from(done != Done::Changed);
    }

    #[inline]
    fn change(&mut self, number: u32, page: &Page, change: Change) -> Done {
        let Some(space) = &mut self.spaces[number as usize] else { return Done::Unchanged };
        let (pages, bytes) = (space.pages.len(), space.states.bytes());
        let room = MAX_STATE_BYTES.saturating_sub(self.state_bytes);
        let done = space.change(space.pages.hash(page), page, change, room);
        self.pages = self.pages + space.pages.len() - pages;
        self.state_bytes = self.state_bytes + space.states.bytes() - bytes;
        if done == Done::Full {
            self.evicted += 1;
        }
        done
    }

    /// Take in a key list, one a line. `known`: where objects are that are not here.
    pub fn add_keys(&mut self, keys: &[u8], known: Option<&Self>) -> Applied {
        let mut applied = Applied::default();
        for line in keys.split(|byte| *byte == b'\n') {
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            if line.is_empty() {
                continue;
            }
            let text = std::str::from_utf8(line).ok();
            let Some(key) = text.and_then(|text| parse(text, self.limits.key_bytes)) else {
                applied.unparsed += 1;
                continue;
            };
            let media = match self.media_of(DEFAULT_TENANT, &key) {
                0 => known.map_or(0, |known| self.numbered(&known.media, known.media_of(DEFAULT_TENANT, &key))),
                media => media,
            };
            self.store(DEFAULT_TENANT, &key, if media == 0 { CPU } else { media }, &mut applied);
        }
        self.finish(applied)
    }

    /// Apply a delta that was read.
    pub fn apply_delta(&mut self, data: &[u8], file: &File) -> Applied {
        let mut applied = Applied::default();
        for part in &file.parts {
            let mut applying = self.begin(file, part, false);
            while let Ok(false) = applying.step(data, self, &mut applied) {}
        }
        self.finish(applied)
    }

    /// Begin with one identity's part of a delta or dump. `each_once`: refuse a page that is there.
    pub fn begin(&mut self, file: &File, part: &Part, each_once: bool) -> Applying {
        let stores = part.patterns.iter().flatten().any(|object| object.media != 0);
        let number = if stores {
            self.make_space(&part.tenant, part.scheme, &part.prefix)
        } else {
            self.find_space(&part.tenant, part.scheme, &part.prefix)
        };
        let patterns =
            part.patterns.iter().map(|pattern| self.compiled(number, pattern, &part.components, &file.media));
        Applying { number, patterns: patterns.collect(), pages: part.pages.clone(), at: 0, each_once }
    }

    /// A pattern of a delta or dump in this index's numbers.
    fn compiled(&mut self, number: u32, pattern: &[Object], components: &[String], media: &[String]) -> Pattern {
        let mut compiled = Pattern::default();
        for object in pattern {
            let name = [&*components[usize::from(object.component)], ""];
            if object.media == 0 {
                compiled.objects += 1;
                let component = self.space(number).and_then(|space| space.components.number(name));
                compiled
                    .changes
                    .extend(component.map(|component| Change::Remove(Object { component, media: u8::MAX })));
                continue;
            }
            let media = self.numbered(media, object.media);
            match self.component(number, name).filter(|_| media != 0) {
                Some(component) => {
                    compiled.objects += 1;
                    compiled.stores += 1;
                    compiled.changes.push(Change::Add(Object { component, media }));
                }
                None if media == 0 => compiled.refused[0] += 1,
                None => compiled.refused[1] += 1,
            }
        }
        // What goes, goes first: a page is then never more than it becomes.
        compiled.changes.sort_by_key(|change| matches!(change, Change::Add(_)));
        compiled
    }

    /// Forget everything, or all of one tenant.
    pub fn clear(&mut self, tenant: Option<&str>) {
        for number in 0..self.spaces.len() as u32 {
            if self.space(number).is_some_and(|space| tenant.is_none_or(|tenant| *space.identity.tenant == *tenant)) {
                self.drop_space(number);
            }
        }
    }

    // Reading

    /// Ranges of positions that can be used: see the twin.
    pub fn find(&self, tenant: &str, layout: &Layout, pages: &[Page]) -> Vec<std::ops::Range<usize>> {
        let Some(scheme) = layout.scheme else { return Vec::new() };
        let Some(space) = self.space(self.find_space(tenant, scheme, &layout.prefix)) else { return Vec::new() };
        space.touch(self.tick());
        layout.find(space, pages)
    }

    /// Names of the media that hold an object.
    pub fn present(&self, tenant: &str, key: &str) -> Vec<&str> {
        let Some(key) = parse(key, self.limits.key_bytes) else { return Vec::new() };
        let media = self.media_of(tenant, &key);
        let names = self.media.iter().enumerate().filter(|(place, _)| media >> place & 1 == 1);
        names.map(|(_, name)| &**name).collect()
    }

    fn media_of(&self, tenant: &str, key: &Key<'_>) -> u8 {
        let space = self.space(self.find_space(tenant, key.scheme, key.prefix));
        space.map_or(0, |space| space.media(&key.page, key.component))
    }

    pub fn media(&self) -> &[Box<str>] {
        &self.media
    }

    /// The one touched longest ago first.
    pub fn spaces(&self) -> Vec<&Space> {
        let mut spaces: Vec<&Space> = self.spaces.iter().flatten().map(|space| &**space).collect();
        spaces.sort_by_key(|space| space.touched.load(Relaxed));
        spaces
    }

    pub fn page_count(&self) -> usize {
        self.pages
    }

    pub fn component_count(&self) -> usize {
        self.components
    }

    pub fn bytes(&self) -> usize {
        let spaces: usize = self.spaces.iter().flatten().map(|space| space.bytes()).sum();
        spaces + self.numbers.allocation_size() + self.spaces.capacity() * 8
    }

    // Spaces

    fn tick(&self) -> u64 {
        self.now.fetch_add(1, Relaxed)
    }

    #[inline]
    fn space(&self, number: u32) -> Option<&Space> {
        self.spaces.get(number as usize)?.as_deref()
    }

    fn is_it(&self, number: u32, tenant: &str, scheme: Scheme, prefix: &str) -> bool {
        self.space(number).is_some_and(|space| {
            *space.identity.prefix == *prefix && space.identity.scheme == scheme && *space.identity.tenant == *tenant
        })
    }

    #[inline]
    fn find_space(&self, tenant: &str, scheme: Scheme, prefix: &str) -> u32 {
        if self.is_it(self.last, tenant, scheme, prefix) {
            return self.last;
        }
        let hash = hash_of(self.keys, tenant, scheme, prefix);
        self.numbers.find(hash, |number| self.is_it(*number, tenant, scheme, prefix)).copied().unwrap_or(NOWHERE)
    }

    /// The space, new if it must be, as the last one touched.
    fn make_space(&mut self, tenant: &str, scheme: Scheme, prefix: &str) -> u32 {
        let mut number = self.find_space(tenant, scheme, prefix);
        if number == NOWHERE {
            while self.numbers.len() >= self.limits.prefixes {
                let Some(oldest) = self.oldest() else { break };
                self.evict_space(oldest);
            }
            self.serial = self.serial.wrapping_add(1);
            let identity = Identity { tenant: tenant.into(), scheme, prefix: prefix.into() };
            let space = Box::new(Space::new(identity, self.serial, self.keys));
            self.state_bytes += space.states.bytes();
            number = self.free.pop().unwrap_or_else(|| {
                self.spaces.push(None);
                self.spaces.len() as u32 - 1
            });
            self.spaces[number as usize] = Some(space);
            let (keys, spaces) = (self.keys, &self.spaces);
            let rehash = |other: &u32| {
                spaces[*other as usize].as_ref().map_or(0, |space| {
                    hash_of(keys, &space.identity.tenant, space.identity.scheme, &space.identity.prefix)
                })
            };
            self.numbers.insert_unique(hash_of(keys, tenant, scheme, prefix), number, rehash);
        }
        self.last = number;
        let now = self.tick();
        if let Some(space) = self.space(number) {
            space.touch(now);
        }
        number
    }

    fn touched(&self) -> impl Iterator<Item = (u64, u32)> {
        let all = self.spaces.iter().enumerate();
        all.filter_map(|(number, space)| Some((space.as_ref()?.touched.load(Relaxed), number as u32)))
    }

    /// The space that was touched last.
    fn newest(&self) -> Option<u32> {
        self.touched().max().map(|(_, number)| number)
    }

    /// The space that was touched longest ago. All are looked through once for many answers: somebody who stores under
    /// ever new prefixes asks at each.
    fn oldest(&mut self) -> Option<u32> {
        loop {
            while let Some(&(touched, number)) = self.oldest.last() {
                if self.space(number).is_some_and(|space| space.touched.load(Relaxed) == touched) {
                    return Some(number);
                }
                self.oldest.pop();
            }
            let mut all: Vec<_> = self.touched().collect();
            if all.is_empty() {
                return None;
            }
            if all.len() > OLDEST_KNOWN {
                all.select_nth_unstable(OLDEST_KNOWN);
                all.truncate(OLDEST_KNOWN);
            }
            all.sort_unstable_by_key(|each| Reverse(*each));
            self.oldest = all;
        }
    }

    /// The number of a component in the space that was touched last; `None`: there is no room.
    #[inline]
    fn component(&mut self, number: u32, name: [&str; 2]) -> Option<u16> {
        let space = self.space(number)?;
        if let Some(component) = space.components.number(name) {
            return Some(component);
        }
        if space.components.len() >= self.limits.components {
            return None;
        }
        while self.components >= MAX_COMPONENTS_IN_ALL {
            let oldest = self.oldest()?;
            if oldest == number {
                return None;
            }
            self.evict_space(oldest);
        }
        self.components += 1;
        Some(self.spaces[number as usize].as_mut()?.components.add(name))
    }

    /// Down to the bound once it is exceeded by more than `slack`. `keep` stays, with a page at least.
    fn make_room(&mut self, keep: u32, slack: usize) {
        if self.pages <= self.limits.pages + slack {
            return;
        }
        while self.pages > self.limits.pages {
            let excess = self.pages - self.limits.pages;
            let size = |(number, space): (usize, &Option<Box<Space>>)| {
                let space = space.as_ref()?;
                let kept = usize::from(number as u32 == keep);
                let touched = Reverse(space.touched.load(Relaxed));
                Some((space.pages.len().saturating_sub(kept), touched, number as u32))
            };
            let largest = self.spaces.iter().enumerate().filter_map(size).max();
            let Some((available, _, number)) = largest.filter(|(available, ..)| *available > 0) else { return };
            let count = excess.min(available);
            if let Some(space) = &mut self.spaces[number as usize] {
                let bytes = space.states.bytes();
                space.evict(count);
                self.state_bytes = self.state_bytes + space.states.bytes() - bytes;
            }
            self.pages -= count;
            self.evicted += count;
            self.drop_if_empty(number);
        }
    }

    fn evict_space(&mut self, number: u32) {
        self.evicted += self.space(number).map_or(0, |space| space.pages.len());
        self.drop_space(number);
    }

    #[inline]
    fn drop_if_empty(&mut self, number: u32) {
        if self.space(number).is_some_and(|space| space.pages.len() == 0) {
            self.drop_space(number);
        }
    }

    fn drop_space(&mut self, number: u32) {
        let Some(space) = self.spaces.get_mut(number as usize).and_then(Option::take) else { return };
        let Identity { tenant, scheme, prefix } = &space.identity;
        if let Ok(entry) =
            self.numbers.find_entry(hash_of(self.keys, tenant, *scheme, prefix), |other| *other == number)
        {
            entry.remove();
        }
        self.pages -= space.pages.len();
        self.components -= space.components.len();
        self.state_bytes -= space.states.bytes();
        self.free.push(number);
    }

    /// Count what a call did.
    fn finish(&mut self, mut applied: Applied) -> Applied {
        if self.pages > self.limits.pages {
            // Of the space that was touched last something stays.
            self.make_room(self.newest().unwrap_or(NOWHERE), 0);
        }
        applied.evicted = std::mem::take(&mut self.evicted);
        let total = &mut self.total;
        total.unparsed += applied.unparsed;
        total.unknown_media += applied.unknown_media;
        total.evicted += applied.evicted;
        for (all, new) in total.rejected.iter_mut().zip(applied.rejected) {
            *all += new;
        }
        applied
    }

    /// End of a load into this index, which was empty.
    pub fn loaded(&mut self, applied: Applied) {
        self.finish(applied);
    }

    /// Hold what `other` holds, the counters go on.
    pub fn replace(&mut self, other: Self) {
        let (backend_id, mut total) = (self.backend_id.take(), self.total);
        total.evicted += other.total.evicted;
        for (all, new) in total.rejected.iter_mut().zip(other.total.rejected) {
            *all += new;
        }
        *self = Self { total, backend_id, limits: self.limits, ..other };
    }
}

/// A pattern of a delta or dump, to be applied to any page. `stores`: objects that it adds, of `objects`.
#[derive(Default)]
struct Pattern {
    changes: Vec<Change>,
    objects: usize,
    stores: u64,
    /// For want of media, and of components.
    refused: [usize; 2],
}

/// One identity's part that is being applied.
pub struct Applying {
    number: u32,
    patterns: Vec<Pattern>,
    pages: std::ops::Range<usize>,
    at: usize,
    /// Refuse a page that is there.
    each_once: bool,
}

/// Bytes of a page and the number of its pattern.
pub const ENTRY_BYTES: usize = PAGE_BYTES + 4;

/// The page and the number of its pattern.
pub fn entry_of(entry: &[u8; ENTRY_BYTES]) -> (Page, usize) {
    let mut page = [0; PAGE_BYTES];
    let mut pattern = [0; 4];
    page.copy_from_slice(&entry[..PAGE_BYTES]);
    pattern.copy_from_slice(&entry[PAGE_BYTES..]);
    (page, u32::from_le_bytes(pattern) as usize)
}

impl Applying {
    /// Some pages more; whether these were all. The error is a sentence.
    pub fn step(&mut self, data: &[u8], index: &mut PoolIndex, applied: &mut Applied) -> Result<bool, String> {
        let (entries, _) = data[self.pages.clone()].as_chunks::<ENTRY_BYTES>();
        let stop = entries.len().min(self.at + SLACK);
        for entry in &entries[self.at..stop] {
            let (page, pattern) = entry_of(entry);
            let is_new = !self.each_once || index.space(self.number).is_none_or(|space| !space.has(&page));
            let pattern = self.patterns.get(pattern).filter(|_| is_new).ok_or(BAD_PAGES)?;
            let (mut stored, mut removed) = (0, 0);
            if index.space(self.number).is_some() {
                for change in &pattern.changes {
                    let changed = usize::from(index.change(self.number, &page, *change) == Done::Changed);
                    *(if matches!(change, Change::Add(_)) { &mut stored } else { &mut removed }) += changed;
                }
                if let Some(space) = &mut index.spaces[self.number as usize] {
                    space.arrived += pattern.stores;
                }
            }
            applied.stored += stored;
            applied.removed += removed;
            applied.unchanged += pattern.objects - stored - removed;
            applied.rejected[Reason::TooManyMedia as usize] += pattern.refused[0];
            applied.rejected[Reason::TooManyComponents as usize] += pattern.refused[1];
        }
        self.at = stop;
        index.make_room(self.number, 0);
        let is_over = stop == entries.len();
        if is_over {
            index.drop_if_empty(self.number);
        }
        Ok(is_over)
    }
}
