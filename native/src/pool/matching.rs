//! Which pages of a chain a layout can use: see `PoolIndex.match` in `kvcore/pool_index.py`.
//!
//! Pages that were stored one after the other are compared one after the other, without a look into the table; others are
//! asked for ahead of time.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::Ordering::Relaxed;

use super::keys::Scheme;
use super::pages::Page;
use super::space::Space;
use super::states::Object;

/// Of so many pages one is looked up first, all of these at once; what lies between is then compared in the slab.
const STRIDE: usize = 64;
/// Pages that are looked up at once.
const AHEAD: usize = 32;
const REMEMBERED: usize = 64;
/// Every page of the layout needs it.
const EVERY: u64 = 1;
/// Different lengths of what is needed at the end; a bit each.
pub const MAX_TRAILING: usize = 63;

/// A layout as it was given: components that every page needs, and those that the last so many pages need.
pub struct Layout {
    pub scheme: Option<Scheme>,
    pub prefix: String,
    pub every: Vec<String>,
    pub trailing: Vec<(usize, Vec<String>)>,
    compiled: Mutex<Option<Compiled>>,
}

/// A layout in the numbers of one space.
#[derive(Clone, Default)]
struct Compiled {
    serial: u64,
    /// Of how many components the space then knew.
    components: usize,
    /// Numbers, ascending; `None`: one is not known.
    every: Option<Vec<u16>>,
    trailing: Vec<(usize, Option<Vec<u16>>)>,
}

/// Pages that stand one after the other in the slab, all in one state.
struct Segment {
    positions: Range<usize>,
    number: u32,
    flags: u64,
}

impl Layout {
    pub fn new(scheme: &str, prefix: String, every: Vec<String>, trailing: Vec<(usize, Vec<String>)>) -> Self {
        Self { scheme: Scheme::named(scheme), prefix, every, trailing, compiled: Mutex::new(None) }
    }

    fn compile(&self, space: &Space) -> Compiled {
        let numbers = |names: &[String]| -> Option<Vec<u16>> {
            let mut numbers =
                names.iter().map(|name| space.components.number([name, ""])).collect::<Option<Vec<_>>>()?;
            numbers.sort_unstable();
            numbers.dedup();
            Some(numbers)
        };
        Compiled {
            serial: space.serial,
            components: space.components.len(),
            every: numbers(&self.every).filter(|every| !every.is_empty()),
            trailing: self.trailing.iter().map(|(pages, names)| (*pages, numbers(names))).collect(),
        }
    }

    /// Ranges of positions that can be used. Their pages are marked as asked for.
    pub fn find(&self, space: &Space, pages: &[Page]) -> Vec<Range<usize>> {
        let Ok(mut kept) = self.compiled.try_lock() else { return self.compile(space).find(space, pages) };
        let fits =
            |compiled: &&Compiled| compiled.serial == space.serial && compiled.components == space.components.len();
        if let Some(compiled) = kept.as_ref().filter(fits) {
            return compiled.find(space, pages);
        }
        kept.insert(self.compile(space)).find(space, pages)
    }
}

/// Whether all of `wanted` are among the objects; both ascending.
fn has_all(objects: &[Object], wanted: &[u16]) -> bool {
    let mut rest = objects.iter();
    wanted.iter().all(|component| rest.any(|object| object.component == *component))
}

impl Compiled {
    fn find(&self, space: &Space, pages: &[Page]) -> Vec<Range<usize>> {
        let Some(every) = &self.every else { return Vec::new() };
        let segments = Search { space, pages, compiled: self, every, known: [(0, 0); REMEMBERED] }.segments();
        let runs = if self.trailing.is_empty() { joined(&segments) } else { self.trimmed(&segments) };
        let mut segments = segments.iter().peekable();
        let mut found = 0;
        for run in &runs {
            found += run.len();
            while let Some(segment) = segments.peek() {
                let start = segment.positions.start.max(run.start);
                let stop = segment.positions.end.min(run.end);
                if start < stop {
                    space.pages.touch_run(segment.number + (start - segment.positions.start) as u32, stop - start);
                }
                if segment.positions.end > run.end {
                    break;
                }
                segments.next();
            }
        }
        space.matched.fetch_add(found as u64, Relaxed);
        runs
    }

    fn flags(&self, objects: &[Object], every: &[u16]) -> u64 {
        let mut flags = u64::from(has_all(objects, every));
        for (place, (_, wanted)) in self.trailing.iter().enumerate() {
            let is_there = wanted.as_ref().is_some_and(|wanted| has_all(objects, wanted));
            flags |= u64::from(is_there) << (place + 1);
        }
        flags
    }

    /// Runs of complete pages, each as long as what is needed at its end allows.
    fn trimmed(&self, segments: &[Segment]) -> Vec<Range<usize>> {
        let mut runs: Vec<Range<usize>> = Vec::new();
        // Of the run at hand: where it began, how far it can be used, and per trailing set after which position it has all.
        let (mut start, mut usable, mut end) = (0, 0, usize::MAX);
        let mut whole_from = vec![0; self.trailing.len()];
        for segment in segments.iter().filter(|segment| segment.flags & EVERY != 0) {
            if segment.positions.start != end {
                if usable > start {
                    runs.push(start..usable);
                }
                start = segment.positions.start;
                usable = start;
                whole_from.fill(start);
            }
            for position in segment.positions.clone() {
                for (place, from) in whole_from.iter_mut().enumerate() {
                    if segment.flags >> (place + 1) & 1 == 0 {
                        *from = position + 1;
                    }
                }
                let stop = position + 1;
                let mut needed = self.trailing.iter().zip(&whole_from);
                if needed.all(|((pages, _), from)| *from <= start.max(stop.saturating_sub(*pages))) {
                    usable = stop;
                }
            }
            end = segment.positions.end;
        }
        if usable > start {
            runs.push(start..usable);
        }
        runs
    }
}

fn joined(segments: &[Segment]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for segment in segments.iter().filter(|segment| segment.flags & EVERY != 0) {
        match runs.last_mut() {
            Some(last) if last.end == segment.positions.start => last.end = segment.positions.end,
            _ => runs.push(segment.positions.clone()),
        }
    }
    runs
}

struct Search<'a> {
    space: &'a Space,
    pages: &'a [Page],
    compiled: &'a Compiled,
    every: &'a [u16],
    /// State and flags, by the lower bits of the state.
    known: [(u32, u64); REMEMBERED],
}

impl Search<'_> {
    fn segments(&mut self) -> Vec<Segment> {
        let mut segments = Vec::with_capacity(8);
        let mut at = 0;
        for start in (0..self.pages.len()).step_by(STRIDE * AHEAD) {
            let stop = self.pages.len().min(start + STRIDE * AHEAD);
            let anchors = self.look_up(start, stop, STRIDE);
            for number in anchors.iter().flatten() {
                self.space.pages.prefetch_run(*number, STRIDE);
            }
            for (anchor, number) in (start..stop).step_by(STRIDE).zip(anchors) {
                let Some(number) = number.filter(|_| anchor >= at) else { continue };
                let before = self.space.pages.run_before(number, &self.pages[at..anchor]);
                self.fill(&mut at, anchor - before, &mut segments);
                if at <= anchor {
                    at += self.follow(at, number - (anchor - at) as u32, &mut segments);
                }
            }
            self.fill(&mut at, stop, &mut segments);
        }
        segments
    }

    /// Numbers of one in `every` pages of these, at most `AHEAD`.
    fn look_up(&self, start: usize, stop: usize, every: usize) -> [Option<u32>; AHEAD] {
        let pages = &self.space.pages;
        let mut hashes = [0; AHEAD];
        let asked = || self.pages[start..stop].iter().step_by(every);
        for (hash, page) in hashes.iter_mut().zip(asked()) {
            *hash = pages.hash(page);
            pages.prefetch(*hash);
        }
        let count = (stop - start).div_ceil(every);
        for hash in &hashes[..count] {
            pages.prefetch_page(*hash);
        }
        let mut numbers = [None; AHEAD];
        for ((number, hash), page) in numbers.iter_mut().zip(hashes).zip(asked()) {
            *number = pages.find(hash, page);
        }
        numbers
    }

    /// Look up every page from `at` up to `stop` that does not follow one before it.
    fn fill(&mut self, at: &mut usize, stop: usize, segments: &mut Vec<Segment>) {
        while *at < stop {
            let start = *at;
            let end = stop.min(start + AHEAD);
            for (position, number) in (start..end).zip(self.look_up(start, end, 1)) {
                if position < *at {
                    continue;
                }
                *at = position + 1;
                if let Some(number) = number {
                    *at = position + self.follow(position, number, segments);
                }
            }
        }
    }

    /// How many pages from position `at` on stand in the slab one after the other, from `number` on.
    fn follow(&mut self, at: usize, mut number: u32, segments: &mut Vec<Segment>) -> usize {
        let mut stop = at;
        loop {
            let state = self.space.pages.state(number);
            let length = if state == 0 { 0 } else { self.space.pages.run(number, &self.pages[stop..], state) };
            if length == 0 {
                return stop - at;
            }
            let flags = self.flags(state);
            if flags & EVERY != 0 {
                segments.push(Segment { positions: stop..stop + length, number, flags });
            }
            stop += length;
            number += length as u32;
        }
    }

    fn flags(&mut self, state: u32) -> u64 {
        let known = &mut self.known[state as usize % REMEMBERED];
        if known.0 != state {
            *known = (state, self.compiled.flags(self.space.states.objects(state), self.every));
        }
        known.1
    }
}
