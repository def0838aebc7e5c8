//! Events as they stand in a payload: columns in a room that is used again and again, texts in the payload itself. What
//! the index needs of an event, wherever it stands, is a view.

use std::borrow::Cow;
use std::cell::RefCell;
use std::ops::Range;

use crate::events::Stored;
use crate::hashing::TOKEN_BYTES;
use crate::media::Place;
use crate::values::Room;

/// Rooms that grew beyond this are given back, in bytes.
const ROOM_KEPT: usize = 4 * 1024 * 1024;

/// One event of a payload.
pub enum Found<'a> {
    Stored(FoundStored<'a>),
    Removed(FoundRemoved),
    Cleared,
}

/// As `events::Stored`; `joined` as in `StoredView`.
pub struct FoundStored<'a> {
    pub hashes: Range<usize>,
    pub parent: Option<u64>,
    pub tokens: Range<usize>,
    pub block_size: i128,
    pub place: Place,
    pub adapter: Option<Cow<'a, str>>,
    pub salt: Option<&'a str>,
    pub mm: Vec<(usize, Vec<u64>)>,
    pub group: Option<i128>,
    pub group_kind: Option<&'a str>,
    pub session_id: Option<&'a str>,
    pub eagle: bool,
    pub misaligned: bool,
    pub joined: bool,
}

/// As `events::Removed`; `joined` as in `RemovedView`.
pub struct FoundRemoved {
    pub hashes: Range<usize>,
    pub place: Place,
    pub group: Option<i128>,
    pub joined: bool,
}

#[derive(Clone, Copy)]
pub enum EventView<'a> {
    Stored(StoredView<'a>),
    Removed(RemovedView<'a>),
    Cleared,
}

/// What `events::Stored` is. `joined`: it stands for one event per block, each the parent of the next.
#[derive(Clone, Copy, Default)]
pub struct StoredView<'a> {
    pub hashes: &'a [u64],
    pub parent: Option<u64>,
    pub tokens: &'a [u8],
    pub block_size: i128,
    pub place: Place,
    pub adapter: Option<&'a str>,
    pub salt: Option<&'a str>,
    pub mm: &'a [(usize, Vec<u64>)],
    pub group: Option<i128>,
    pub group_kind: Option<&'a str>,
    pub session_id: Option<&'a str>,
    pub eagle: bool,
    pub misaligned: bool,
    pub joined: bool,
}

/// What `events::Removed` is. `joined`: it stands for one event per block.
#[derive(Clone, Copy)]
pub struct RemovedView<'a> {
    pub hashes: &'a [u64],
    pub tier: usize,
    pub group: Option<i128>,
    pub joined: bool,
}

impl Found<'_> {
    pub fn view<'r>(&'r self, room: &'r Room) -> EventView<'r> {
        match self {
            Self::Stored(stored) => EventView::Stored(stored.view(room)),
            Self::Removed(removed) => EventView::Removed(RemovedView {
                hashes: &room.hashes[removed.hashes.clone()],
                tier: removed.place.tier.into(),
                group: removed.group,
                joined: removed.joined,
            }),
            Self::Cleared => EventView::Cleared,
        }
    }

    /// Take in the event that follows, if both are of one block and applying them as one gives the same.
    pub fn join(&mut self, next: &Self, room: &Room) -> bool {
        match (self, next) {
            (Self::Removed(last), Self::Removed(next)) => last.join(next),
            (Self::Stored(last), Self::Stored(next)) => last.join(next, room),
            _ => false,
        }
    }
}

impl FoundRemoved {
    fn join(&mut self, next: &Self) -> bool {
        let alike = next.hashes.len() == 1
            && (self.joined || self.hashes.len() == 1)
            && self.hashes.end == next.hashes.start
            && self.place == next.place
            && self.group == next.group;
        if alike {
            self.hashes.end = next.hashes.end;
            self.joined = true;
        }
        alike
    }
}

impl FoundStored<'_> {
    pub fn view<'r>(&'r self, room: &'r Room) -> StoredView<'r> {
        StoredView {
            hashes: &room.hashes[self.hashes.clone()],
            parent: self.parent,
            tokens: &room.tokens[self.tokens.clone()],
            block_size: self.block_size,
            place: self.place,
            adapter: self.adapter.as_deref(),
            salt: self.salt,
            mm: &self.mm,
            group: self.group,
            group_kind: self.group_kind,
            session_id: self.session_id,
            eagle: self.eagle,
            misaligned: self.misaligned,
            joined: self.joined,
        }
    }

    /// Whether nothing but its tokens says what its block is.
    fn is_plain(&self) -> bool {
        self.adapter.is_none()
            && self.salt.is_none()
            && self.session_id.is_none()
            && self.mm.is_empty()
            && !self.eagle
            && !self.misaligned
    }

    fn join(&mut self, next: &Self, room: &Room) -> bool {
        let blocks = self.hashes.len();
        let alike = next.hashes.len() == 1
            && (self.joined || blocks == 1)
            && self.hashes.end == next.hashes.start
            && self.tokens.end == next.tokens.start
            && !next.tokens.is_empty()
            && self.tokens.len() == blocks * next.tokens.len()
            && next.parent == Some(room.hashes[next.hashes.start - 1])
            && self.block_size == next.block_size
            && self.place == next.place
            && self.group == next.group
            && self.group_kind == next.group_kind
            && self.is_plain()
            && next.is_plain();
        if alike {
            self.hashes.end = next.hashes.end;
            self.tokens.end = next.tokens.end;
            self.joined = true;
        }
        alike
    }
}

impl StoredView<'_> {
    pub fn token_count(&self) -> usize {
        (self.tokens.len() / TOKEN_BYTES).saturating_sub(self.eagle.into())
    }

    /// Tokens over hashes: the block size that was really used; 0 without tokens.
    pub fn tokens_per_block(&self) -> usize {
        if self.tokens.is_empty() || self.hashes.is_empty() { 0 } else { self.token_count() / self.hashes.len() }
    }

    pub fn owned(self) -> Stored {
        Stored {
            hashes: self.hashes.to_vec(),
            parent: self.parent,
            tokens: self.tokens.to_vec(),
            block_size: self.block_size,
            place: self.place,
            adapter: self.adapter.map(str::to_owned),
            salt: self.salt.map(str::to_owned),
            mm: self.mm.to_vec(),
            group: self.group,
            group_kind: self.group_kind.map(str::to_owned),
            session_id: self.session_id.map(str::to_owned),
            eagle: self.eagle,
            misaligned: self.misaligned,
        }
    }

    /// Of a joined event what follows `at` blocks, still joined.
    pub fn rest(self, at: usize) -> Self {
        let stride = self.tokens.len() / self.hashes.len();
        let parent = if at == 0 { self.parent } else { Some(self.hashes[at - 1]) };
        Self { hashes: &self.hashes[at..], tokens: &self.tokens[at * stride..], parent, ..self }
    }

    /// Of a joined event the events that it stands for, from the one of block `at` on.
    pub fn each(self, at: usize) -> impl Iterator<Item = Self> {
        let stride = self.tokens.len() / self.hashes.len();
        (at..self.hashes.len()).map(move |at| {
            let event = self.rest(at);
            Self { hashes: &event.hashes[..1], tokens: &event.tokens[..stride], joined: false, ..event }
        })
    }
}

thread_local! {
    static ROOM: RefCell<(Room, Vec<Found<'static>>)> = RefCell::default();
}

/// Lend `work` an empty room and an empty list; it gives the list back when it succeeds.
pub fn with_room<'a, T, E>(
    work: impl FnOnce(&mut Room, Vec<Found<'a>>) -> Result<(T, Vec<Found<'a>>), E>,
) -> Result<T, E> {
    let (mut room, events) = ROOM.take();
    let (result, mut events) = work(&mut room, events)?;
    events.clear();
    room.hashes.clear();
    room.tokens.clear();
    let bytes = room.hashes.capacity() * 8 + room.tokens.capacity() + events.capacity() * size_of::<Found<'_>>();
    if bytes <= ROOM_KEPT {
        // Empty, so that it can hold events of any payload; this keeps the memory.
        let events = events.into_iter().map(|_| unreachable!()).collect();
        ROOM.set((room, events));
    }
    Ok(result)
}
