//! Matching a chain: how far each rank reaches, and how much of that lies in which tier.
//!
//! Where a rank has no holes, its presence along any chain is a prefix, so that a few probes find its end. The probes of
//! one round do not depend on each other: all are asked for before the first is looked at. Ranks with holes are followed
//! block by block, until the last of them has ended.

use std::cell::RefCell;

use super::masks::{Mask, Masks};
use super::ranks::Index;
use super::table::ChainTable;

/// In the first round a probe for so many blocks.
const STRIDE: usize = 48;
const FEWEST: usize = 4;
/// Probes within a stretch in which the set of holders changes.
const WITHIN: usize = 7;
/// Blocks that are asked for ahead of a walk.
const AHEAD: usize = 16;

/// What one rank holds of a chain, by tier.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Match {
    pub place: u32,
    pub blocks: [u32; 4],
}

/// The chain hashes asked for, u64 little-endian.
#[derive(Clone, Copy)]
struct Chain<'a>(&'a [[u8; 8]]);

impl Chain<'_> {
    fn len(self) -> usize {
        self.0.len()
    }

    #[inline]
    fn at(self, position: usize) -> u64 {
        u64::from_le_bytes(self.0[position])
    }
}

/// A stretch of the chain: all of `before` are present at `low`, only `after` (places in the arena) at `high`.
#[derive(Clone, Copy)]
struct Stretch {
    low: usize,
    high: usize,
    before: usize,
    after: usize,
}

/// Room that is used again and again.
#[derive(Default)]
struct Scratch {
    /// Sets, `width` words each.
    sets: Vec<u64>,
    stretches: Vec<Stretch>,
    next: Vec<Stretch>,
    probes: Vec<usize>,
    set: Vec<u64>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
    /// Room of answers that nobody needs any more: in a process with many objects, allocating it costs more than a match.
    static ROOM: RefCell<Vec<Vec<Match>>> = RefCell::default();
}

const ROOM_KEPT: usize = 8;
const ROOM_MOST: usize = 4096;

impl Match {
    /// Take back the room of an answer.
    pub fn give_back(mut matches: Vec<Self>) {
        if matches.capacity() == 0 || matches.capacity() > ROOM_MOST {
            return;
        }
        matches.clear();
        // A thread that ends has no room any more.
        let _ = ROOM.try_with(|room| {
            if let Ok(mut room) = room.try_borrow_mut()
                && room.len() < ROOM_KEPT
            {
                room.push(matches);
            }
        });
    }
}

impl Index {
    /// Every rank that holds a prefix of `chain`, in no particular order.
    pub fn matches(&self, chain: &[u8]) -> Vec<Match> {
        let (hashes, _) = chain.as_chunks::<8>();
        SCRATCH.with(|scratch| match scratch.try_borrow_mut() {
            Ok(mut scratch) => self.matches_with(Chain(hashes), &mut scratch),
            Err(_) => self.matches_with(Chain(hashes), &mut Scratch::default()),
        })
    }

    fn matches_with(&self, chain: Chain<'_>, scratch: &mut Scratch) -> Vec<Match> {
        if chain.len() == 0 {
            return Vec::new();
        }
        let mask = self.masks.presence.get(chain.at(0));
        if mask == 0 {
            return Vec::new();
        }
        let mut matches = ROOM.with_borrow_mut(Vec::pop).unwrap_or_default();
        let width = self.masks.pool.width();
        let mut first = vec![u64::MAX; width];
        self.masks.pool.intersect(&mut first, mask);
        let (mut closed, mut holed, mut grouped) = (vec![0; width], vec![0; width], vec![0; width]);
        let mut lowered = false;
        for at in 0..width {
            let word = first[at] & !self.aside.word(at);
            grouped[at] = word & self.grouped.word(at);
            holed[at] = word & self.holed.word(at) & !self.grouped.word(at);
            closed[at] = word & !(holed[at] | grouped[at]);
            lowered |= word & self.lowered.word(at) & !grouped[at] != 0;
        }
        if any(&closed) {
            gallop(&self.masks, chain, &closed, scratch, &mut matches);
            if matches.len() > closed.iter().map(|word| word.count_ones() as usize).sum() {
                keep_shortest(&mut matches);
            }
        }
        if any(&holed) {
            walk(&self.masks, chain, &holed, scratch, &mut matches);
        }
        if lowered {
            self.count_lower_tiers(chain, &mut matches);
        }
        if any(&grouped) {
            self.match_grouped(chain, &grouped, &mut matches);
        }
        matches
    }

    /// Move what lies below the device to its tier.
    fn count_lower_tiers(&self, chain: Chain<'_>, matches: &mut [Match]) {
        let mut by_place: Vec<u32> = vec![u32::MAX; self.owners.len()];
        let mut longest = 0;
        for (at, found) in matches.iter().enumerate() {
            if self.lowered.contains(found.place) {
                by_place[found.place as usize] = at as u32;
                longest = longest.max(found.blocks[0]);
            }
        }
        let reaches: Vec<u32> = matches.iter().map(|found| found.blocks[0]).collect();
        let mut set = vec![0; self.masks.pool.width()];
        for tier in 1..4 {
            let table = &self.masks.below[tier - 1];
            if table.is_empty() {
                continue;
            }
            for_runs(table, chain, longest as usize, |mask, start, end| {
                set.fill(u64::MAX);
                self.masks.pool.intersect(&mut set, mask);
                for_places(&set, |place| {
                    let Some(&at) = by_place.get(place as usize) else { return };
                    let Some(reach) = reaches.get(at as usize) else { return };
                    let blocks = (end as u32).min(*reach).saturating_sub(start as u32);
                    let found = &mut matches[at as usize];
                    found.blocks[tier] += blocks;
                    found.blocks[0] = found.blocks[0].saturating_sub(blocks);
                });
            });
        }
    }

    /// Ranks with several main groups: a position counts where all groups hold it, at the worst of their tiers.
    fn match_grouped(&self, chain: Chain<'_>, mask: &[u64], matches: &mut Vec<Match>) {
        // The masks at each position, in all four tables, as far as any such rank may reach.
        let mut positions: Vec<[Mask; 4]> = Vec::new();
        let mut set = mask.to_vec();
        let tables = [&self.masks.presence, &self.masks.below[0], &self.masks.below[1], &self.masks.below[2]];
        let used = tables.map(|table| !table.is_empty());
        for at in 0..chain.len().min(AHEAD) {
            tables[0].prefetch(chain.at(at));
        }
        for at in 0..chain.len() {
            if at + AHEAD < chain.len() {
                tables[0].prefetch(chain.at(at + AHEAD));
            }
            let own = chain.at(at);
            let mut masks = [0; 4];
            for (mask, (table, used)) in masks.iter_mut().zip(tables.iter().zip(used)) {
                *mask = if used { table.get(own) } else { 0 };
            }
            if positions.last().is_none_or(|last| last[0] != masks[0]) {
                if masks[0] == 0 {
                    break;
                }
                self.masks.pool.intersect(&mut set, masks[0]);
                if !any(&set) {
                    break;
                }
            }
            positions.push(masks);
        }
        let pool = &self.masks.pool;
        for owner in self.ranks().iter().filter(|owner| owner.groups.len() > 1) {
            let holds_all = |mask| mask != 0 && owner.groups.iter().all(|(_, group)| pool.contains(mask, group.place));
            let holds_any = |mask| mask != 0 && owner.groups.iter().any(|(_, group)| pool.contains(mask, group.place));
            let mut blocks = [0u32; 4];
            for masks in positions.chunk_by(|one, other| one == other) {
                if !holds_all(masks[0][0]) {
                    break;
                }
                let tier = (1..4).rev().find(|tier| holds_any(masks[0][*tier])).unwrap_or(0);
                blocks[tier] += masks.len() as u32;
            }
            if blocks != [0; 4]
                && let Some((_, group)) = owner.groups.first()
            {
                matches.push(Match { place: group.place, blocks });
            }
        }
    }
}

fn any(set: &[u64]) -> bool {
    set.iter().any(|word| *word != 0)
}

fn for_places(set: &[u64], mut take: impl FnMut(u32)) {
    for (at, word) in set.iter().enumerate() {
        let mut word = *word;
        while word != 0 {
            take(at as u32 * 64 + word.trailing_zeros());
            word &= word - 1;
        }
    }
}

/// Runs of equal masks, empty ones left out: mask, start, end.
fn for_runs(table: &ChainTable, chain: Chain<'_>, length: usize, mut take: impl FnMut(Mask, usize, usize)) {
    let length = length.min(chain.len());
    for at in 0..length.min(AHEAD) {
        table.prefetch(chain.at(at));
    }
    let (mut start, mut last) = (0, 0);
    for at in 0..length {
        if at + AHEAD < length {
            table.prefetch(chain.at(at + AHEAD));
        }
        let mask = table.get(chain.at(at));
        if mask != last {
            if last != 0 {
                take(last, start, at);
            }
            (start, last) = (at, mask);
        }
    }
    if last != 0 {
        take(last, start, length);
    }
}

/// Reach of places that are present at position 0, one look per block.
fn walk(masks: &Masks, chain: Chain<'_>, places: &[u64], scratch: &mut Scratch, matches: &mut Vec<Match>) {
    let set = &mut scratch.set;
    set.clear();
    set.extend_from_slice(places);
    let length = chain.len();
    for at in 0..length.min(AHEAD) {
        masks.presence.prefetch(chain.at(at));
    }
    let mut last = 0;
    let mut ended = vec![0; set.len()];
    for at in 0..length {
        if at + AHEAD < length {
            masks.presence.prefetch(chain.at(at + AHEAD));
        }
        let mask = masks.presence.get(chain.at(at));
        if mask == last {
            continue;
        }
        last = mask;
        ended.copy_from_slice(set);
        if mask == 0 {
            set.fill(0);
        } else if !masks.pool.intersect(set, mask) {
            continue;
        }
        for (ended, kept) in ended.iter_mut().zip(set.iter()) {
            *ended &= !kept;
        }
        reached(&ended, at, matches);
        if !any(set) {
            return;
        }
    }
    reached(set, length, matches);
}

fn reached(set: &[u64], blocks: usize, matches: &mut Vec<Match>) {
    for_places(set, |place| matches.push(Match { place, blocks: [blocks as u32, 0, 0, 0] }));
}

/// Reach of places that are present at position 0 and whose presence along any chain is a prefix.
fn gallop(masks: &Masks, chain: Chain<'_>, places: &[u64], scratch: &mut Scratch, matches: &mut Vec<Match>) {
    let width = places.len();
    let Scratch { sets, stretches, next, probes, set } = scratch;
    sets.clear();
    sets.extend_from_slice(places);
    stretches.clear();
    let length = chain.len();
    if length > 1 {
        // The first round: is everything still there at the end, and where not?
        spread(0, length - 1, (length / STRIDE).max(FEWEST), probes);
        probes.push(length - 1);
        prefetch(masks, chain, probes);
        resolve(
            masks,
            chain,
            Stretch { low: 0, high: length, before: 0, after: usize::MAX },
            probes,
            sets,
            width,
            set,
            stretches,
        );
    }
    // Places that are there at the end: what is left after the last stretch.
    let left = stretches.last().map_or(0, |stretch| stretch.after);
    let whole = &sets[left..left + width];
    if any(whole) {
        reached(whole, length, matches);
    }
    while !stretches.is_empty() {
        for stretch in stretches.iter().filter(|stretch| stretch.high - stretch.low > 1) {
            spread(stretch.low, stretch.high, WITHIN, probes);
            prefetch(masks, chain, probes);
        }
        next.clear();
        for stretch in stretches.iter() {
            if stretch.high - stretch.low > 1 {
                spread(stretch.low, stretch.high, WITHIN, probes);
                resolve(masks, chain, *stretch, probes, sets, width, set, next);
                continue;
            }
            set.clear();
            set.extend((0..width).map(|at| sets[stretch.before + at] & !sets[stretch.after + at]));
            reached(set, stretch.high, matches);
        }
        std::mem::swap(stretches, next);
    }
}

/// A dump that was tampered with can have holes that nobody counted: then a place may be found at several of its ends.
#[cold]
fn keep_shortest(matches: &mut Vec<Match>) {
    matches.sort_unstable_by_key(|found| (found.place, found.blocks[0]));
    matches.dedup_by_key(|found| found.place);
}

fn prefetch(masks: &Masks, chain: Chain<'_>, positions: &[usize]) {
    for at in positions {
        masks.presence.prefetch(chain.at(*at));
    }
}

/// Up to `count` positions strictly between `low` and `high`, evenly spread.
fn spread(low: usize, high: usize, count: usize, probes: &mut Vec<usize>) {
    probes.clear();
    let inside = high - low - 1;
    let count = count.min(inside);
    probes.extend((1..=count).map(|part| low + part * (inside + 1) / (count + 1)));
}

/// Look at the probes within a stretch: the shorter stretches in which the set changes.
#[expect(clippy::too_many_arguments, reason = "all of it is scratch")]
fn resolve(
    masks: &Masks,
    chain: Chain<'_>,
    stretch: Stretch,
    probes: &[usize],
    sets: &mut Vec<u64>,
    width: usize,
    set: &mut Vec<u64>,
    out: &mut Vec<Stretch>,
) {
    let Stretch { mut low, high, mut before, after } = stretch;
    set.clear();
    set.extend_from_slice(&sets[before..before + width]);
    let mut last = 0;
    for &at in probes {
        let mask = masks.presence.get(chain.at(at));
        if mask == last && mask != 0 {
            low = at;
            continue;
        }
        last = mask;
        if mask == 0 {
            set.fill(0);
        } else if !masks.pool.intersect(set, mask) {
            low = at;
            continue;
        }
        let now = sets.len();
        sets.extend_from_slice(set);
        out.push(Stretch { low, high: at, before, after: now });
        (low, before) = (at, now);
        let ended = if after == usize::MAX { !any(set) } else { sets[after..after + width] == sets[now..now + width] };
        if ended {
            return;
        }
    }
    if after != usize::MAX {
        out.push(Stretch { low, high, before, after });
    }
}
