//! What one KV-cache group of one rank holds: engine hashes, the chain hashes they stand for, copies per tier.
//!
//! The rules are those of `kvcore/residency.py`: copies and identity are learned apart, a resident block with an identity
//! is present, a present block whose parent is not resident is a hole.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::blocks::{Blocks, Copies, all_in, best_tier, copies_in, one_in};
use super::masks::Masks;
use super::result::{Applied, Reason};
use crate::events::Stored;
use crate::found::{RemovedView, StoredView};
use crate::hashing::{SEED, chain_step, local_hashes, seed_of};
use crate::media::Place;

/// How far ahead table places are asked for, and then the blocks that they name.
const AHEAD: usize = 12;
const BLOCKS_AHEAD: usize = 6;

/// Bounds of one group, in blocks.
#[derive(Clone, Copy)]
pub struct Bounds {
    pub held: usize,
    pub remembered: usize,
}

/// A stored event whose blocks have no identity yet; `None` when it need not wait any more.
type Waiting = Option<Arc<Stored>>;

/// The block before the first one of an event.
#[derive(Clone, Copy)]
pub struct Parent {
    block: u32,
    own: u64,
    seed: u64,
}

/// A run of blocks whose chain hashes are given.
pub struct Given<'a> {
    pub hashes: &'a [u64],
    pub chain: &'a [u64],
    pub parent: Option<u64>,
    pub tier: u8,
}

/// One group of one rank.
pub struct Residency {
    pub place: u32,
    pub block_size: Option<u64>,
    pub blocks: Blocks,
    pub present: usize,
    pub holes: i64,
    /// The engine gave a hash a second meaning: parents prove nothing any more, as if there were holes.
    pub ambiguous: bool,
    pub lowered: i64,
    pub held: usize,
    pub connector_copies: Copies,
    bounds: Bounds,
    waiting: VecDeque<Waiting>,
    /// Number of the first of `waiting` since the start.
    first_waiting: u64,
    by_parent: HashMap<u64, VecDeque<u64>>,
    pub(super) remembered: VecDeque<u64>,
    /// Present blocks by chain hash, from the first time that two engine hashes meant one.
    pub(super) by_own: Option<HashMap<u64, u32>>,
    /// Where the next eviction goes on.
    hand: u32,
}

impl Residency {
    pub fn new(place: u32, bounds: Bounds, masks: &Masks) -> Self {
        Self {
            place,
            block_size: None,
            blocks: Blocks::new(masks.keys),
            present: 0,
            holes: 0,
            ambiguous: false,
            lowered: 0,
            held: 0,
            connector_copies: 0,
            bounds,
            waiting: VecDeque::new(),
            first_waiting: 0,
            by_parent: HashMap::new(),
            remembered: VecDeque::new(),
            by_own: None,
            hand: 0,
        }
    }

    // Events

    /// Count one copy of each block, and learn identities where the tokens allow it.
    pub fn store(&mut self, masks: &mut Masks, event: &StoredView<'_>, applied: &mut Applied) {
        if event.joined {
            return self.store_joined(masks, event, applied);
        }
        if event.misaligned {
            return applied.reject(Reason::Misaligned);
        }
        let size = event.tokens_per_block() as u64;
        if size > 0 && self.block_size.is_some_and(|known| known != size) {
            return applied.reject(Reason::BlockSize);
        }
        if event.place.connector {
            self.connector_copies |= all_in(event.place.tier.into());
        }
        if size == 0 {
            return self.store_without_identity(masks, event, applied);
        }
        self.block_size = Some(size);
        let parent = match event.parent {
            None => None,
            Some(engine) => match self.identified(engine) {
                None => return self.store_without_identity(masks, event, applied),
                parent => parent,
            },
        };
        self.bind(masks, event, parent, applied, true);
        if !self.by_parent.is_empty() {
            self.release(masks, event.hashes, applied);
        }
    }

    /// Count one copy of each block, whose chain hashes are given. A parent that is not known is a hole.
    pub fn store_given(&mut self, masks: &mut Masks, given: &Given<'_>, applied: &mut Applied) {
        let parent = given.parent.and_then(|engine| self.identified(engine));
        for own in given.chain.iter().take(AHEAD) {
            masks.presence.prefetch(*own);
        }
        let event = StoredView {
            hashes: given.hashes,
            parent: given.parent,
            place: Place { tier: given.tier, ..Place::default() },
            ..StoredView::default()
        };
        let seed = self.blocks.lend_seed(parent.map_or(SEED, |parent| parent.seed));
        self.bind_each(masks, &event, given.chain, seed, parent, applied, true);
        self.blocks.return_seed(seed);
        if !self.by_parent.is_empty() {
            self.release(masks, given.hashes, applied);
        }
    }

    /// Many events of one block each. As one where that is the same: while each finds the parent that the one before it
    /// left, and nothing waits for any of them.
    fn store_joined(&mut self, masks: &mut Masks, event: &StoredView<'_>, applied: &mut Applied) {
        let size = event.tokens_per_block() as u64;
        let mut done = 0;
        if self.by_parent.is_empty() && self.block_size.is_none_or(|known| known == size) {
            let parent = event.parent.map(|engine| self.identified(engine));
            if parent.is_none_or(|parent| parent.is_some()) {
                if event.place.connector {
                    self.connector_copies |= all_in(event.place.tier.into());
                }
                self.block_size = Some(size);
                done = self.bind(masks, event, parent.flatten(), applied, true);
            }
        }
        event.each(done).for_each(|event| self.store(masks, &event, applied));
    }

    /// Remove one copy of each block from its tier; without a copy there it is a no-op, counted.
    pub fn remove(&mut self, masks: &mut Masks, event: &RemovedView<'_>, applied: &mut Applied) {
        let (hashes, tier) = (event.hashes, event.tier);
        for engine in hashes.iter().take(AHEAD) {
            self.blocks.prefetch_name(*engine);
        }
        let mut unknown = 0;
        for (at, &engine) in hashes.iter().enumerate() {
            if let Some(ahead) = hashes.get(at + AHEAD) {
                self.blocks.prefetch_name(*ahead);
            }
            if let Some(ahead) = hashes.get(at + BLOCKS_AHEAD) {
                self.blocks.prefetch_block(*ahead);
            }
            if let Some(own) = hashes.get(at + BLOCKS_AHEAD / 2).and_then(|ahead| self.blocks.guess_own(*ahead)) {
                masks.presence.prefetch(own);
            }
            if event.joined && at > 0 {
                self.forget(); // as after each of the events
            }
            let Some(block) = self.blocks.get(engine) else {
                unknown += 1;
                continue;
            };
            let copies = self.blocks.copies(block);
            if copies_in(copies, tier) == 0 {
                unknown += 1;
            } else if copies != one_in(tier) {
                self.set(masks, engine, block, copies - one_in(tier));
            } else {
                self.blocks.set_copies(block, 0);
                if let Some(own) = self.blocks.own(block) {
                    self.vanish(masks, block, own, tier);
                }
                self.remember(engine);
            }
        }
        applied.unknown_removed += unknown;
        applied.removed += hashes.len() - unknown;
        self.forget();
    }

    /// The engine emptied its own pool: what connectors hold stays, all else goes.
    pub fn clear_pool(&mut self, masks: &mut Masks) {
        if self.connector_copies == 0 {
            return self.clear(masks);
        }
        self.forget_waiting();
        for number in 0..self.blocks.end() {
            if let Some((engine, block)) = self.blocks.named(number) {
                let kept = self.blocks.copies(block) & self.connector_copies;
                self.set(masks, engine, block, kept);
            }
        }
        for number in 0..self.blocks.end() {
            if let Some((engine, block)) = self.blocks.named(number) {
                if self.blocks.own(block).is_none() && self.blocks.children(block) == 0 {
                    self.blocks.forget(engine);
                } else if !self.blocks.is_resident(block) {
                    self.remember(engine);
                }
            }
        }
        self.forget();
    }

    /// Forget everything, the block size included, and give the memory back.
    pub fn clear(&mut self, masks: &mut Masks) {
        let blocks = self.take();
        unmark(&blocks, self.place, masks, 0, blocks.end());
    }

    /// Become empty; the blocks, whose marks must be taken from the masks by `unmark`.
    pub fn take(&mut self) -> Blocks {
        let empty = self.blocks.empty();
        let blocks = std::mem::replace(&mut self.blocks, empty);
        self.present = 0;
        (self.holes, self.lowered, self.ambiguous) = (0, 0, false);
        self.connector_copies = 0;
        self.block_size = None;
        self.forget_waiting();
        self.remembered = VecDeque::new();
        self.by_own = None;
        self.hand = 0;
        blocks
    }

    fn forget_waiting(&mut self) {
        self.first_waiting += self.waiting.len() as u64;
        self.waiting = VecDeque::new();
        self.by_parent = HashMap::new();
        self.held = 0;
    }

    /// Drop up to `count` names, but none whose block a resident one hangs on; how many went.
    ///
    /// Blocks go in the order of their numbers, from where the last eviction ended and around: mostly those stored first.
    /// Within each stretch the last goes first, so that chains lose their tails.
    pub fn evict(&mut self, masks: &mut Masks, count: usize) -> usize {
        let mut evicted = 0;
        let mut left = self.blocks.end().saturating_add(count as u32);
        while evicted < count && left > 0 {
            let end = self.blocks.end();
            if self.hand >= end {
                self.hand = 0;
            }
            let stop = end.min(self.hand.saturating_add(count as u32));
            left = left.saturating_sub((stop - self.hand).max(1));
            for number in (self.hand..stop).rev() {
                let Some((engine, block)) = self.blocks.named(number) else { continue };
                if self.blocks.children(block) != 0 || evicted == count {
                    continue;
                }
                self.set(masks, engine, block, 0);
                self.blocks.forget(engine);
                evicted += 1;
            }
            self.hand = stop;
        }
        evicted
    }

    /// Set the copies of a block as a dump has them.
    pub fn restore(&mut self, masks: &mut Masks, engine: u64, copies: Copies) {
        let Some(block) = self.blocks.get(engine) else { return };
        if let Some(own) = self.blocks.own(block) {
            masks.link(own, engine);
        }
        if self.blocks.is_resident(block) {
            return; // named by another engine hash before
        }
        if copies == 0 {
            self.remember(engine);
        } else {
            self.set(masks, engine, block, copies);
        }
    }

    /// Give back what is mostly empty.
    pub fn shrink(&mut self) {
        if self.blocks.is_sparse() {
            let numbers = self.blocks.compact();
            for block in self.by_own.iter_mut().flat_map(HashMap::values_mut) {
                *block = numbers[*block as usize];
            }
            self.hand = 0;
        }
    }

    // Identity

    fn identified(&self, engine: u64) -> Option<Parent> {
        let block = self.blocks.get(engine)?;
        Some(Parent { block, own: self.blocks.own(block)?, seed: self.blocks.seed(block) })
    }

    fn store_without_identity(&mut self, masks: &mut Masks, event: &StoredView<'_>, applied: &mut Applied) {
        let mut unknown = 0;
        for &engine in event.hashes {
            let block = self.blocks.get(engine).unwrap_or_else(|| self.blocks.add_nameless(engine));
            let named = self.blocks.own(block).is_some();
            // It comes back without tokens. Its parent may have been forgotten meanwhile, and the parent's engine hash
            // given to another block: then it would look reachable where it is not.
            self.ambiguous |= named && self.blocks.copies(block) == 0 && self.blocks.parent(block).is_some();
            unknown += usize::from(!named);
            self.add(masks, engine, block, event.place.tier.into());
        }
        applied.stored += event.hashes.len();
        if unknown == 0 {
            return;
        }
        applied.held += unknown;
        self.hold(Arc::new(event.owned()));
        while self.held > self.bounds.held && !self.waiting.is_empty() {
            applied.dropped += self.drop_oldest();
        }
    }

    /// Let an event wait for its parent (or, without tokens, for any event that names its blocks).
    pub fn hold(&mut self, event: Arc<Stored>) {
        self.held += event.hashes.len();
        if let (Some(parent), 1..) = (event.parent, event.tokens_per_block()) {
            let number = self.first_waiting + self.waiting.len() as u64;
            self.by_parent.entry(parent).or_default().push_back(number);
        }
        self.waiting.push_back(Some(event));
    }

    /// Events that wait.
    pub fn held_events(&self) -> impl Iterator<Item = &Arc<Stored>> {
        self.waiting.iter().flatten()
    }

    fn drop_oldest(&mut self) -> usize {
        let number = self.first_waiting;
        self.first_waiting += 1;
        let Some(event) = self.waiting.pop_front().flatten() else { return 0 };
        self.held -= event.hashes.len();
        if let (Some(parent), 1..) = (event.parent, event.tokens_per_block())
            && let Some(others) = self.by_parent.get_mut(&parent)
        {
            if others.front() == Some(&number) {
                others.pop_front();
            }
            if others.is_empty() {
                self.by_parent.remove(&parent);
            }
        }
        let mut dropped = 0;
        for &engine in &event.hashes {
            if let Some(block) = self.blocks.get(engine)
                && self.blocks.own(block).is_none()
                && self.blocks.children(block) == 0
            {
                self.blocks.forget(engine);
                dropped += 1;
            }
        }
        dropped
    }

    /// These blocks have an identity now: so have the ones that waited for them.
    fn release(&mut self, masks: &mut Masks, hashes: &[u64], applied: &mut Applied) {
        let mut ready = hashes.to_vec();
        while let Some(engine) = ready.pop() {
            if self.by_parent.is_empty() {
                break;
            }
            if !self.by_parent.contains_key(&engine) {
                continue;
            }
            let Some(parent) = self.identified(engine) else { continue };
            for number in self.by_parent.remove(&engine).unwrap_or_default() {
                let place = number.wrapping_sub(self.first_waiting) as usize;
                let Some(event) = self.waiting.get_mut(place).and_then(Option::take) else { continue };
                self.held -= event.hashes.len();
                self.bind(masks, &event.view(), Some(parent), applied, false);
                ready.extend(&event.hashes);
            }
        }
        while let Some(None) = self.waiting.front() {
            self.waiting.pop_front();
            self.first_waiting += 1;
        }
    }

    /// Give the blocks of `event` their chain hashes, and count a copy of each unless that was done before.
    /// How many blocks are done: of a joined event the others must be applied one by one.
    fn bind(
        &mut self,
        masks: &mut Masks,
        event: &StoredView<'_>,
        parent: Option<Parent>,
        applied: &mut Applied,
        count: bool,
    ) -> usize {
        let seed = match parent {
            Some(parent) => parent.seed,
            None => seed_of(event.adapter.unwrap_or("").as_bytes(), event.salt.unwrap_or("").as_bytes()),
        };
        let mut chain = std::mem::take(&mut masks.chain);
        chain.clear();
        let mut last = parent.map(|parent| parent.own);
        local_hashes(event.tokens, event.tokens_per_block(), seed, event.mm, event.eagle, |local| {
            let own = chain_step(last, local);
            if chain.len() < AHEAD {
                masks.presence.prefetch(own);
            }
            last = Some(own);
            chain.push(own);
        });
        let number = self.blocks.lend_seed(seed);
        let done = self.bind_each(masks, event, &chain, number, parent, applied, count);
        self.blocks.return_seed(number);
        masks.chain = chain;
        done
    }

    #[expect(clippy::too_many_arguments, reason = "the body of bind")]
    fn bind_each(
        &mut self,
        masks: &mut Masks,
        event: &StoredView<'_>,
        chain: &[u64],
        seed: u32,
        parent: Option<Parent>,
        applied: &mut Applied,
        count: bool,
    ) -> usize {
        let tier = usize::from(event.place.tier);
        let hashes = event.hashes;
        for engine in hashes.iter().take(AHEAD) {
            self.blocks.prefetch_name(*engine);
        }
        let (mut before, mut above) = (event.parent, parent.map(|parent| parent.block));
        for (at, (&engine, &own)) in hashes.iter().zip(chain).enumerate() {
            if let Some(ahead) = hashes.get(at + AHEAD) {
                self.blocks.prefetch_name(*ahead);
            }
            if let Some(ahead) = hashes.get(at + BLOCKS_AHEAD) {
                self.blocks.prefetch_block(*ahead);
            }
            if let Some(ahead) = chain.get(at + AHEAD) {
                masks.presence.prefetch(*ahead);
            }
            if event.joined && at > 0 {
                self.forget(); // as after each of the events
            }
            let known = self.blocks.get(engine);
            let is_attached = above.is_some() || before.is_none();
            if known.is_none() && count && is_attached && masks.add(own, self.place) {
                // A block that is new to the rank, by far the most common case.
                let block = self.blocks.add(engine, own, seed, before, Some(tier));
                self.present += 1;
                applied.stored += 1;
                masks.link(own, engine);
                if let Some(above) = above {
                    self.blocks.add_children(above, 1);
                    self.holes += i64::from(!self.blocks.is_resident(above));
                }
                self.lower(masks, own, tier, 1);
                if let Some(by_own) = &mut self.by_own {
                    by_own.insert(own, block);
                }
                (before, above) = (Some(engine), Some(block));
                continue;
            }
            let block = match known {
                Some(block) if self.blocks.own(block).is_none() => {
                    self.identify(masks, engine, block, own, seed, before);
                    self.blocks.get(engine).unwrap_or(block)
                }
                Some(block) if self.blocks.own(block) == Some(own) => block,
                Some(block) if self.blocks.is_resident(block) || self.blocks.children(block) != 0 => {
                    // The engine cannot mean two things by one hash while it holds the block.
                    applied.reject(Reason::HashConflict);
                    return at + 1;
                }
                _ => {
                    self.ambiguous |= known.is_some();
                    self.blocks.forget(engine);
                    if !count {
                        self.remember(engine);
                    }
                    self.blocks.add(engine, own, seed, before, None)
                }
            };
            if count {
                self.add(masks, engine, block, tier);
                applied.stored += 1;
            }
            masks.link(own, engine);
            (before, above) = (Some(engine), self.blocks.get(engine));
            if event.joined && above.is_none_or(|above| !self.blocks.has_seed(above, seed)) {
                self.forget();
                return at + 1; // the next one is of another namespace
            }
        }
        self.forget();
        hashes.len()
    }

    fn identify(&mut self, masks: &mut Masks, engine: u64, block: u32, own: u64, seed: u32, parent: Option<u64>) {
        let copies = self.blocks.copies(block);
        self.blocks.set_copies(block, 0);
        self.ambiguous |= self.blocks.children(block) > 0;
        self.blocks.identify(block, own, seed, parent);
        if copies != 0 {
            self.set(masks, engine, block, copies);
        }
    }

    /// Whether its block is still needed is decided by `forget`.
    #[inline]
    pub(super) fn remember(&mut self, engine: u64) {
        if self.remembered.len() == self.remembered.capacity() {
            // Not doubled: most groups always remember as many as they may.
            self.remembered.reserve_exact(16.max(self.remembered.len() / 8));
        }
        self.remembered.push_back(engine);
    }

    /// Bytes that blocks and lists take.
    pub fn bytes(&self) -> usize {
        size_of::<Self>() + self.blocks.bytes() + self.remembered.capacity() * size_of::<u64>()
    }

    /// Keep the remembered blocks within their bound, the oldest go first.
    #[inline]
    fn forget(&mut self) {
        for _ in self.bounds.remembered..self.remembered.len() {
            if let Some(ahead) = self.remembered.get(AHEAD) {
                self.blocks.prefetch_name(*ahead);
            }
            if let Some(ahead) = self.remembered.get(BLOCKS_AHEAD) {
                self.blocks.prefetch_forget(*ahead);
            }
            let Some(engine) = self.remembered.pop_front() else { return };
            let Some(block) = self.blocks.get(engine) else { continue };
            if self.blocks.is_resident(block) {
                continue;
            }
            if self.blocks.children(block) == 0 {
                self.blocks.forget(engine);
            } else {
                self.remember(engine);
            }
        }
    }
}

/// Take the marks of the blocks from `start` to `end` out of the masks.
pub fn unmark(blocks: &Blocks, place: u32, masks: &mut Masks, start: u32, end: u32) {
    for number in start..end {
        if !blocks.is_block(number) {
            continue;
        }
        let copies = blocks.copies(number);
        if let (Some(own), true) = (blocks.own(number), copies != 0) {
            masks.discard(own, place);
            match best_tier(copies) {
                0 => {}
                tier => masks.discard_below(tier, own, place),
            }
        }
    }
}
