//! Every rank of every worker in one index: which group an event belongs to, and the bound on all of them together.
//!
//! The rules are those of `kvcore/index.py`.

use std::collections::HashMap;
use std::sync::Arc;

use pyo3::Py;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyString;

use super::links::Links;
use super::masks::{MAX_PLACES, Masks};
use super::residency::{Bounds, Given, Residency};
use super::result::{Applied, Reason};
use super::table::MAX_NUMBERS;
use crate::events::is_main_kind;
use crate::found::{EventView, RemovedView, StoredView};

/// Groups of one rank, those that form the prefix and others each; real engines have below ten.
pub const MAX_GROUPS: usize = 64;

/// Bounds in blocks.
#[derive(Clone, Copy)]
pub struct Limits {
    pub blocks: usize,
    /// Links from chain hashes to engine hashes.
    pub links: usize,
    pub group: Bounds,
}

/// Who a rank is.
pub struct RankKey {
    pub worker: String,
    pub rank: i64,
    /// `worker` as a Python text, made when it is first asked for.
    pub name: PyOnceLock<Py<PyString>>,
}

impl RankKey {
    pub fn new(worker: &str, rank: i64) -> Arc<Self> {
        Arc::new(Self { worker: worker.to_owned(), rank, name: PyOnceLock::new() })
    }
}

/// One rank and its groups, in the order in which they came.
pub struct Rank {
    pub key: Arc<RankKey>,
    pub groups: Vec<(i128, Residency)>,
    pub other_kinds: Vec<(i128, String)>,
    /// Blocks, as last counted into `Index::known`.
    known: usize,
    /// Counts its changes.
    pub version: u64,
}

impl Rank {
    pub fn new(key: Arc<RankKey>) -> Self {
        Self { key, groups: Vec::new(), other_kinds: Vec::new(), known: 0, version: 0 }
    }

    fn group(&mut self, number: i128) -> Option<&mut Residency> {
        self.groups.iter_mut().find(|(other, _)| *other == number).map(|(_, group)| group)
    }

    fn has_group(&self, number: i128) -> bool {
        self.groups.iter().any(|(other, _)| *other == number)
    }

    fn is_other(&self, number: i128) -> bool {
        self.other_kinds.iter().any(|(other, _)| *other == number)
    }

    pub fn block_size(&self) -> Option<u64> {
        self.groups.iter().find_map(|(_, group)| group.block_size)
    }
}

/// A set of places.
#[derive(Default, Clone)]
pub struct Places(pub Vec<u64>);

impl Places {
    fn set(&mut self, place: u32, to: bool) {
        let at = place as usize / 64;
        if at >= self.0.len() {
            if !to {
                return;
            }
            self.0.resize(at + 1, 0);
        }
        let bit = 1 << (place % 64);
        self.0[at] = if to { self.0[at] | bit } else { self.0[at] & !bit };
    }

    pub fn word(&self, at: usize) -> u64 {
        self.0.get(at).copied().unwrap_or(0)
    }

    pub fn contains(&self, place: u32) -> bool {
        self.word(place as usize / 64) >> (place % 64) & 1 == 1
    }

    pub fn count(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }
}

/// Counts for metrics, as `kvcore.index.IndexStats`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Stats {
    pub ranks: usize,
    pub resident: usize,
    pub unique: usize,
    pub known: usize,
    pub held: usize,
    pub evicted: usize,
    pub dropped: usize,
    pub holed: usize,
    pub links: usize,
}

/// All ranks.
pub struct Index {
    pub limits: Limits,
    pub masks: Masks,
    ranks: Vec<Rank>,
    numbers: HashMap<String, Vec<(i64, usize)>>,
    /// By place. A free place keeps its last owner, but is in no mask.
    pub owners: Arc<Vec<Arc<RankKey>>>,
    free: std::collections::BinaryHeap<std::cmp::Reverse<u32>>,
    pub holed: Places,
    pub lowered: Places,
    pub grouped: Places,
    /// Places of ranks that the index does not answer for.
    pub aside: Places,
    known: usize,
    evicted: usize,
    dropped: usize,
}

impl Index {
    pub fn new(limits: Limits) -> Self {
        let limits = Limits { blocks: limits.blocks.min(MAX_NUMBERS / 4), ..limits };
        Self {
            limits,
            masks: Masks::new(limits.links),
            ranks: Vec::new(),
            numbers: HashMap::new(),
            owners: Arc::default(),
            free: std::collections::BinaryHeap::new(),
            holed: Places::default(),
            lowered: Places::default(),
            grouped: Places::default(),
            aside: Places::default(),
            known: 0,
            evicted: 0,
            dropped: 0,
        }
    }

    // Writing

    /// Apply the events in order.
    pub fn apply(
        &mut self,
        worker: &str,
        rank: i64,
        events: &mut dyn Iterator<Item = EventView<'_>>,
        applied: &mut Applied,
    ) {
        self.change(worker, rank, applied, |index, owner, applied| {
            for event in events {
                match event {
                    EventView::Stored(stored) => index.store(owner, &stored, applied),
                    EventView::Removed(removed) => index.remove(owner, &removed, applied),
                    EventView::Cleared => {
                        applied.cleared += 1;
                        for (_, group) in &mut owner.groups {
                            group.clear_pool(&mut index.masks);
                        }
                    }
                }
            }
        });
    }

    /// Apply a stored event of no group, whose chain hashes are given.
    pub fn apply_given(&mut self, worker: &str, rank: i64, given: &Given<'_>, applied: &mut Applied) {
        self.change(worker, rank, applied, |index, owner, applied| {
            if owner.groups.is_empty() {
                if owner.is_other(0) {
                    applied.other_groups += given.hashes.len();
                } else if index.add_group(owner, 0).is_none() {
                    applied.reject(Reason::TooManyGroups);
                }
            }
            for (_, group) in &mut owner.groups {
                group.store_given(&mut index.masks, given, applied);
            }
        });
    }

    fn change(
        &mut self,
        worker: &str,
        rank: i64,
        applied: &mut Applied,
        change: impl FnOnce(&mut Self, &mut Rank, &mut Applied),
    ) {
        let number = self.number_or_new(worker, rank);
        let mut owner = self.take(number);
        owner.version += 1;
        change(self, &mut owner, applied);
        for (_, group) in &mut owner.groups {
            group.shrink();
        }
        self.refresh(&mut owner);
        applied.block_size = owner.block_size();
        self.ranks[number] = owner;
        if self.known > self.limits.blocks {
            applied.evicted = self.evict();
        }
        if applied.cleared > 0 {
            self.masks.shrink();
        }
        self.dropped += applied.dropped;
    }

    /// Forget every block of the rank; the rank stays.
    pub fn clear_rank(&mut self, worker: &str, rank: i64) {
        let number = self.number_or_new(worker, rank);
        let mut owner = self.take(number);
        self.empty(&mut owner);
        self.ranks[number] = owner;
        self.masks.shrink();
    }

    pub fn remove_worker(&mut self, worker: &str) {
        let Some(ranks) = self.numbers.remove(worker) else { return };
        for (_, number) in &ranks {
            let mut owner = self.take(*number);
            self.empty(&mut owner);
        }
        // Those that stay keep their order.
        let mut gone: Vec<bool> = vec![false; self.ranks.len()];
        for (_, number) in &ranks {
            gone[*number] = true;
        }
        let mut at = 0;
        self.ranks.retain(|_| {
            at += 1;
            !gone[at - 1]
        });
        self.renumber();
        self.masks.shrink();
    }

    fn empty(&mut self, owner: &mut Rank) {
        owner.version += 1;
        while !owner.groups.is_empty() {
            self.drop_group(owner, 0);
        }
        owner.other_kinds.clear();
        self.refresh(owner);
    }

    fn renumber(&mut self) {
        self.numbers.clear();
        for (number, owner) in self.ranks.iter().enumerate() {
            let key = &owner.key;
            self.numbers.entry(key.worker.clone()).or_default().push((key.rank, number));
        }
    }

    // Reading

    fn number(&self, worker: &str, rank: i64) -> Option<usize> {
        self.numbers.get(worker)?.iter().find(|(other, _)| *other == rank).map(|(_, number)| *number)
    }

    pub fn rank(&self, worker: &str, rank: i64) -> Option<&Rank> {
        self.number(worker, rank).map(|number| &self.ranks[number])
    }

    /// In the order in which they came.
    pub fn ranks(&self) -> &[Rank] {
        &self.ranks
    }

    /// Blocks that the rank holds, any tier (of several groups, the fullest).
    pub fn resident(&self, worker: &str, rank: i64) -> usize {
        let groups = self.rank(worker, rank).map_or(&[][..], |owner| &owner.groups);
        groups.iter().map(|(_, group)| group.present).max().unwrap_or(0)
    }

    pub fn stats(&self) -> Stats {
        let groups = || self.ranks.iter().flat_map(|owner| &owner.groups).map(|(_, group)| group);
        Stats {
            ranks: self.ranks.len(),
            resident: groups().map(|group| group.present).sum(),
            unique: self.masks.presence.len(),
            known: self.known,
            held: groups().map(|group| group.held).sum(),
            evicted: self.evicted,
            dropped: self.dropped,
            holed: self.holed.count(),
            links: self.masks.links.as_ref().map_or(0, Links::len),
        }
    }

    /// Bytes that the blocks, tables and sets take.
    pub fn bytes(&self) -> usize {
        let groups = self.ranks.iter().flat_map(|owner| &owner.groups);
        self.masks.bytes() + groups.map(|(_, group)| group.bytes()).sum::<usize>()
    }

    // Ranks set aside

    /// Make `new` the rank of its key; the one that it replaces goes aside.
    pub fn adopt(&mut self, mut new: Rank) -> Option<Rank> {
        for (_, group) in &new.groups {
            self.aside.set(group.place, false);
        }
        let (worker, rank) = (new.key.worker.clone(), new.key.rank);
        let number = self.number_or_new(&worker, rank);
        let mut old = self.take(number);
        new.version = old.version + 1;
        self.refresh(&mut new);
        self.ranks[number] = new;
        for (_, group) in &old.groups {
            self.aside.set(group.place, true);
        }
        self.known -= old.known;
        old.known = 0;
        (old.version > 0 || !old.groups.is_empty()).then_some(old)
    }

    /// Keep the bound after ranks were adopted.
    pub fn evict_surplus(&mut self) {
        if self.known > self.limits.blocks {
            self.evict();
        }
    }

    // Ranks, groups and their places

    fn number_or_new(&mut self, worker: &str, rank: i64) -> usize {
        if let Some(number) = self.number(worker, rank) {
            return number;
        }
        let number = self.ranks.len();
        self.ranks.push(Rank::new(RankKey::new(worker, rank)));
        self.numbers.entry(worker.to_owned()).or_default().push((rank, number));
        number
    }

    /// A rank to work on; it must be put back.
    fn take(&mut self, number: usize) -> Rank {
        let key = self.ranks[number].key.clone();
        std::mem::replace(&mut self.ranks[number], Rank::new(key))
    }

    fn store(&mut self, owner: &mut Rank, event: &StoredView<'_>, applied: &mut Applied) {
        let number = event.group.unwrap_or(0);
        match event.group_kind {
            Some(kind) if !is_main_kind(kind) => {
                if let Some(number) = event.group {
                    if owner.other_kinds.len() < MAX_GROUPS {
                        match owner.other_kinds.iter_mut().find(|(other, _)| *other == number) {
                            Some((_, known)) => kind.clone_into(known),
                            None => owner.other_kinds.push((number, kind.to_owned())),
                        }
                    }
                    // Taken for a main group before its kind was said.
                    if let Some(at) = owner.groups.iter().position(|(other, _)| *other == number) {
                        self.drop_group(owner, at);
                    }
                }
            }
            _ if event.group.is_none() && !owner.groups.is_empty() => {
                for (_, group) in &mut owner.groups {
                    group.store(&mut self.masks, event, applied);
                }
                return;
            }
            _ if owner.has_group(number) => {
                if let Some(group) = owner.group(number) {
                    group.store(&mut self.masks, event, applied);
                }
                return;
            }
            kind if kind.is_some() || (number == 0 && !owner.is_other(0)) => {
                if event.joined {
                    return event.each(0).for_each(|event| self.store(owner, &event, applied));
                }
                match self.add_group(owner, number) {
                    Some(group) => group.store(&mut self.masks, event, applied),
                    None => applied.reject(Reason::TooManyGroups),
                }
                return;
            }
            _ => {}
        }
        applied.other_groups += event.hashes.len();
    }

    fn remove(&mut self, owner: &mut Rank, event: &RemovedView<'_>, applied: &mut Applied) {
        let hashes = event.hashes;
        match event.group {
            None if owner.groups.is_empty() => applied.unknown_removed += hashes.len(),
            None => owner.groups.iter_mut().for_each(|(_, group)| group.remove(&mut self.masks, event, applied)),
            Some(number) => {
                let is_other = number != 0 || owner.is_other(number);
                match owner.group(number) {
                    Some(group) => group.remove(&mut self.masks, event, applied),
                    None if is_other => applied.other_groups += hashes.len(),
                    None => applied.unknown_removed += hashes.len(),
                }
            }
        }
    }

    /// A new group with a place of its own; `None` when there are too many.
    pub fn add_group<'r>(&mut self, owner: &'r mut Rank, number: i128) -> Option<&'r mut Residency> {
        if owner.groups.len() >= MAX_GROUPS {
            return None;
        }
        let owners = Arc::make_mut(&mut self.owners);
        let place = if let Some(std::cmp::Reverse(place)) = self.free.pop() {
            owners[place as usize] = owner.key.clone();
            place
        } else if owners.len() < MAX_PLACES {
            owners.push(owner.key.clone());
            owners.len() as u32 - 1
        } else {
            return None;
        };
        self.masks.pool.reserve(place as usize + 1);
        owner.groups.push((number, Residency::new(place, self.limits.group, &self.masks)));
        owner.groups.last_mut().map(|(_, group)| group)
    }

    /// As `add_group`, for a rank that the index does not answer for yet.
    pub fn add_group_aside<'r>(&mut self, owner: &'r mut Rank, number: i128) -> Option<&'r mut Residency> {
        let group = self.add_group(owner, number)?;
        self.aside.set(group.place, true);
        Some(group)
    }

    /// Forget a group, given by its place in the rank.
    pub fn drop_group(&mut self, owner: &mut Rank, at: usize) {
        let (_, mut group) = owner.groups.remove(at);
        group.clear(&mut self.masks);
        let place = group.place;
        self.free.push(std::cmp::Reverse(place));
        for places in [&mut self.holed, &mut self.lowered, &mut self.grouped, &mut self.aside] {
            places.set(place, false);
        }
        self.refresh(owner);
    }

    /// After a change: how the rank must be matched, and its size.
    fn refresh(&mut self, owner: &mut Rank) {
        let several = owner.groups.len() > 1;
        let mut known = 0;
        for (_, group) in &owner.groups {
            self.holed.set(group.place, group.holes != 0 || group.ambiguous);
            self.lowered.set(group.place, group.lowered != 0);
            self.grouped.set(group.place, several);
            known += group.blocks.len();
        }
        self.known = self.known + known - owner.known;
        owner.known = known;
    }

    // Memory

    /// Get below the bound with some room, so that this is not done for every batch; how many blocks went.
    fn evict(&mut self) -> usize {
        let mut evicted = 0;
        let mut surplus = self.known.saturating_sub(self.limits.blocks) + self.limits.blocks / 32;
        while surplus > 0 {
            let size = |owner: &Rank| owner.groups.iter().map(|(_, group)| group.blocks.len()).max().unwrap_or(0);
            let Some((number, _)) = self.ranks.iter().enumerate().max_by_key(|(_, owner)| size(owner)) else { break };
            let mut owner = self.take(number);
            let fullest = owner.groups.iter_mut().max_by_key(|(_, group)| group.blocks.len());
            let gone = fullest.map_or(0, |(_, group)| {
                let gone = group.evict(&mut self.masks, surplus.min((group.blocks.len() / 8).max(1)));
                group.shrink();
                gone
            });
            owner.version += 1;
            self.refresh(&mut owner);
            self.ranks[number] = owner;
            if gone == 0 {
                break;
            }
            surplus = surplus.saturating_sub(gone);
            evicted += gone;
        }
        self.evicted += evicted;
        self.masks.shrink();
        evicted
    }
}
