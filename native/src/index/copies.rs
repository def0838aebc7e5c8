//! Copies of blocks, and what follows from them: presence in the masks, holes, tiers.

use super::blocks::{Copies, MOST, best_tier, copies_in, one_in};
use super::masks::Masks;
use super::residency::Residency;

impl Residency {
    pub(super) fn add(&mut self, masks: &mut Masks, engine: u64, block: u32, tier: usize) {
        let copies = self.blocks.copies(block);
        if copies_in(copies, tier) < MOST {
            self.set(masks, engine, block, copies + one_in(tier));
        }
    }

    pub(super) fn set(&mut self, masks: &mut Masks, engine: u64, block: u32, copies: Copies) {
        let old = self.blocks.copies(block);
        let Some(own) = self.blocks.own(block) else { return self.blocks.set_copies(block, copies) };
        if old == 0 {
            if copies == 0 {
                return;
            }
            if masks.holds(own, self.place) {
                return self.merge(masks, engine, block, own, copies);
            }
            self.blocks.set_copies(block, copies);
            self.appear(masks, block, own, best_tier(copies));
            return;
        }
        self.blocks.set_copies(block, copies);
        if copies == 0 {
            self.vanish(masks, block, own, best_tier(old));
        } else if best_tier(old) != best_tier(copies) {
            self.lower(masks, own, best_tier(old), -1);
            self.lower(masks, own, best_tier(copies), 1);
        }
    }

    pub(super) fn appear(&mut self, masks: &mut Masks, block: u32, own: u64, tier: usize) {
        masks.add(own, self.place);
        self.lower(masks, own, tier, 1);
        self.present += 1;
        self.holes -= i64::from(self.blocks.children(block));
        if let Some(engine) = self.blocks.parent(block) {
            let parent = self.blocks.get(engine).unwrap_or_else(|| {
                // Forgotten; its place is kept, so that its children are counted.
                self.remember(engine);
                self.blocks.add_nameless(engine)
            });
            self.blocks.add_children(parent, 1);
            self.holes += i64::from(!self.is_whole(parent));
        }
        if let Some(by_own) = &mut self.by_own {
            by_own.insert(own, block);
        }
    }

    pub(super) fn vanish(&mut self, masks: &mut Masks, block: u32, own: u64, tier: usize) {
        masks.discard(own, self.place);
        self.lower(masks, own, tier, -1);
        self.present -= 1;
        self.holes += i64::from(self.blocks.children(block));
        if let Some(parent) = self.blocks.parent(block).and_then(|engine| self.blocks.get(engine)) {
            self.blocks.add_children(parent, -1);
            self.holes -= i64::from(!self.is_whole(parent));
        }
        if let Some(by_own) = &mut self.by_own {
            by_own.remove(&own);
        }
    }

    /// Resident, and with an identity.
    fn is_whole(&self, block: u32) -> bool {
        self.blocks.is_resident(block) && self.blocks.own(block).is_some()
    }

    /// One block more (or less) whose best tier is `tier`; the device needs no record.
    #[inline]
    pub(super) fn lower(&mut self, masks: &mut Masks, own: u64, tier: usize, change: i64) {
        if tier == 0 {
            return;
        }
        if change > 0 {
            masks.add_below(tier, own, self.place);
        } else {
            masks.discard_below(tier, own, self.place);
        }
        self.lowered += change;
    }

    /// A second engine hash of a block that is present under another one: both name the same block from here on.
    pub(super) fn merge(&mut self, masks: &mut Masks, engine: u64, block: u32, own: u64, copies: Copies) {
        let blocks = &self.blocks;
        let by_own = self.by_own.get_or_insert_with(|| {
            let present = (0..blocks.end()).filter(|number| blocks.is_block(*number) && blocks.is_resident(*number));
            present.filter_map(|number| Some((blocks.own(number)?, number))).collect()
        });
        let Some(&twin) = by_own.get(&own) else { return };
        let children = self.blocks.children(block);
        // They may name it by another engine hash, which goes on naming the old block.
        self.ambiguous |= children != 0;
        self.holes -= i64::from(children);
        self.blocks.add_children(twin, children);
        self.blocks.add_children(block, children.wrapping_neg());
        self.blocks.forget(engine);
        self.blocks.name_it(engine, twin);
        let mut total = self.blocks.copies(twin);
        for tier in 0..4 {
            let room = MOST - copies_in(total, tier);
            total += copies_in(copies, tier).min(room) << (16 * tier);
        }
        self.set(masks, engine, twin, total);
    }
}
