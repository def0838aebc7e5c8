//! One engine payload decoded, as `kvcore/events.py` does it (spec: engine-events §2.1, §4, §6).
//!
//! Every event is read in one pass. One that cannot be read is passed over and counted by reason, the rest stands; only
//! bytes that are no batch at all are an error.

use std::ops::Range;
use std::sync::Arc;

use crate::extra_keys::ExtraKeys;
use crate::found::{EventView, Found, FoundRemoved, FoundStored, RemovedView, StoredView, with_room};
use crate::media::{Place, place_of};
use crate::msgpack::{Head, Read, Reader, Unreadable};
use crate::values::{Hashes, Parent, Room, Tokens};

pub const MAX_PAYLOAD_BYTES: usize = 32 * 1024 * 1024;

/// Blocks became resident, in chain order; the fields are those of the Python twin.
#[derive(Debug, Default, Clone)]
pub struct Stored {
    pub hashes: Vec<u64>,
    pub parent: Option<u64>,
    pub tokens: Vec<u8>,
    pub block_size: i128,
    pub place: Place,
    pub adapter: Option<String>,
    pub salt: Option<String>,
    pub mm: Vec<(usize, Vec<u64>)>,
    pub group: Option<i128>,
    pub group_kind: Option<String>,
    pub session_id: Option<String>,
    pub eagle: bool,
    pub misaligned: bool,
}

impl Stored {
    pub fn view(&self) -> StoredView<'_> {
        StoredView {
            hashes: &self.hashes,
            parent: self.parent,
            tokens: &self.tokens,
            block_size: self.block_size,
            place: self.place,
            adapter: self.adapter.as_deref(),
            salt: self.salt.as_deref(),
            mm: &self.mm,
            group: self.group,
            group_kind: self.group_kind.as_deref(),
            session_id: self.session_id.as_deref(),
            eagle: self.eagle,
            misaligned: self.misaligned,
            joined: false,
        }
    }

    /// Tokens over hashes: the block size that was really used; 0 without tokens.
    pub fn tokens_per_block(&self) -> usize {
        self.view().tokens_per_block()
    }

    /// Whether the tokens, if there are any, can be cut into one block per hash.
    pub fn is_whole(&self) -> bool {
        let (tokens, hashes) = (self.view().token_count(), self.hashes.len());
        tokens == 0 || (hashes > 0 && tokens.is_multiple_of(hashes))
    }
}

#[derive(Debug)]
pub struct Removed {
    pub hashes: Vec<u64>,
    pub place: Place,
    pub group: Option<i128>,
}

#[derive(Debug, Clone)]
pub enum Event {
    Stored(Arc<Stored>),
    Removed(Arc<Removed>),
    Cleared,
}

impl Event {
    pub fn view(&self) -> EventView<'_> {
        match self {
            Self::Stored(stored) => EventView::Stored(stored.view()),
            Self::Removed(removed) => EventView::Removed(RemovedView {
                hashes: &removed.hashes,
                tier: removed.place.tier.into(),
                group: removed.group,
                joined: false,
            }),
            Self::Cleared => EventView::Cleared,
        }
    }
}

/// Why an event is left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    UnknownTag,
    BadField,
    BadToken,
    BadHash,
}

impl Reason {
    pub const ALL: [Self; 4] = [Self::UnknownTag, Self::BadField, Self::BadToken, Self::BadHash];

    pub const fn name(self) -> &'static str {
        match self {
            Self::UnknownTag => "unknown_tag",
            Self::BadField => "bad_field",
            Self::BadToken => "bad_token",
            Self::BadHash => "bad_hash",
        }
    }
}

#[derive(Default)]
pub struct Batch<E = Event> {
    pub ts: f64,
    pub rank: Option<u32>,
    pub events: Vec<E>,
    /// Events left out, by `Reason`.
    pub rejected: [u64; Reason::ALL.len()],
    pub unknown_media: u64,
}

/// Decode one payload; the error is a sentence.
pub fn decode_batch(payload: &[u8]) -> Result<Batch, String> {
    with_room(|room, events| {
        let batch = decode(payload, room, events, false)?;
        let owned = |event: &Found<'_>| match event {
            Found::Stored(stored) => Event::Stored(Arc::new(stored.view(room).owned())),
            Found::Removed(removed) => Event::Removed(Arc::new(Removed {
                hashes: room.hashes[removed.hashes.clone()].to_vec(),
                place: removed.place,
                group: removed.group,
            })),
            Found::Cleared => Event::Cleared,
        };
        let Batch { ts, rank, rejected, unknown_media, .. } = batch;
        let owned = Batch { ts, rank, events: batch.events.iter().map(owned).collect(), rejected, unknown_media };
        Ok((owned, batch.events))
    })
}

/// Decode one payload and hand its events to `apply`, with nothing allocated for the usual ones. Events of one block that
/// follow each other are joined where that changes nothing. The error is a sentence, and nothing was handed over.
pub fn with_events<T>(
    payload: &[u8],
    apply: impl FnOnce(&mut dyn Iterator<Item = EventView<'_>>, &[u64; Reason::ALL.len()]) -> T,
) -> Result<T, String> {
    with_room(|room, events| {
        let batch = decode(payload, room, events, true)?;
        let applied = apply(&mut batch.events.iter().map(|event| event.view(room)), &batch.rejected);
        Ok((applied, batch.events))
    })
}

fn decode<'a>(
    payload: &'a [u8],
    room: &mut Room,
    events: Vec<Found<'a>>,
    join: bool,
) -> Result<Batch<Found<'a>>, String> {
    if payload.len() > MAX_PAYLOAD_BYTES {
        let length = payload.len();
        return Err(format!("a payload of {length} bytes exceeds the limit of {MAX_PAYLOAD_BYTES} bytes"));
    }
    let mut reader = Reader::new(payload);
    let mut batch = Batch { ts: 0.0, rank: None, events, rejected: Default::default(), unknown_media: 0 };
    let rank = envelope(&mut reader, &mut batch, room, join)
        .ok()
        .filter(|_| reader.is_at_end())
        .ok_or_else(|| format!("not a batch of KV events: wrong or malformed at byte {}", reader.at))?;
    if let Some(rank) = rank {
        batch.rank = Some(u32::try_from(rank).map_err(|_| format!("data_parallel_rank {rank} is not a rank"))?);
    }
    Ok(batch)
}

fn envelope<'a>(
    reader: &mut Reader<'a>,
    batch: &mut Batch<Found<'a>>,
    room: &mut Room,
    join: bool,
) -> Read<Option<i128>> {
    let mut rank = None;
    if reader.next_is_map() {
        let mut has_events = false;
        for _ in 0..reader.map()? {
            match reader.key()? {
                b"ts" => batch.ts = reader.float()?,
                b"events" => {
                    batch.events.clear();
                    (batch.rejected, batch.unknown_media) = Default::default();
                    read_events(reader, batch, room, join)?;
                    has_events = true;
                }
                b"data_parallel_rank" => rank = reader.optional_int()?,
                _ => reader.skip()?,
            }
        }
        return if has_events { Ok(rank) } else { Err(Unreadable) };
    }
    let members = reader.array()?;
    if members < 2 {
        return Err(Unreadable);
    }
    batch.ts = reader.float()?;
    read_events(reader, batch, room, join)?;
    if members > 2 {
        rank = reader.optional_int()?;
    }
    (3..members).try_for_each(|_| reader.skip())?;
    Ok(rank)
}

fn read_events<'a>(reader: &mut Reader<'a>, batch: &mut Batch<Found<'a>>, room: &mut Room, join: bool) -> Read<()> {
    for _ in 0..reader.array()? {
        let start = *reader;
        match read_event(reader, room) {
            Ok(Ok((event, known))) => {
                batch.unknown_media += u64::from(!known);
                if !(join && batch.events.last_mut().is_some_and(|last| last.join(&event, room))) {
                    batch.events.push(event);
                }
            }
            Ok(Err(reason)) => batch.rejected[reason as usize] += 1,
            Err(Unreadable) => {
                *reader = start;
                reader.skip()?;
                batch.rejected[reason_of(start) as usize] += 1;
            }
        }
    }
    Ok(())
}

/// Why an event could not be read: its tag is none of ours, or one of its fields is wrong.
fn reason_of(mut event: Reader<'_>) -> Reason {
    let tag = if event.next_is_map() { last_tag(&mut event) } else { first_tag(&mut event) };
    match tag {
        Ok("BlockStored" | "BlockRemoved" | "AllBlocksCleared") | Err(Unreadable) => Reason::BadField,
        Ok(_) => Reason::UnknownTag,
    }
}

fn first_tag<'a>(event: &mut Reader<'a>) -> Read<&'a str> {
    if event.array()? == 0 { Err(Unreadable) } else { event.text() }
}

fn last_tag<'a>(event: &mut Reader<'a>) -> Read<&'a str> {
    let mut tag = Err(Unreadable);
    for _ in 0..event.map()? {
        if event.key()? == b"type" {
            tag = Ok(event.text()?);
        } else {
            event.skip()?;
        }
    }
    tag
}

/// The event, and whether its medium has a name that we know.
type Decoded<'a> = Result<(Found<'a>, bool), Reason>;

fn read_event<'a>(reader: &mut Reader<'a>, room: &mut Room) -> Read<Decoded<'a>> {
    let mut wire = Wire::default();
    let tag = if reader.next_is_map() { wire.read_map(reader, room)? } else { wire.read_array(reader, room)? };
    Ok(match tag {
        Tag::Stored => wire.stored(room).map(|stored| (stored.place.known, Found::Stored(stored))),
        Tag::Removed => wire.removed().map(|removed| (removed.place.known, Found::Removed(removed))),
        Tag::Cleared => Ok((true, Found::Cleared)),
    }
    .map(|(known, event)| (event, known)))
}

#[derive(Clone, Copy, PartialEq)]
enum Tag {
    Stored,
    Removed,
    Cleared,
}

impl Tag {
    fn read(reader: &mut Reader<'_>) -> Read<Self> {
        match reader.key()? {
            b"BlockStored" => Ok(Self::Stored),
            b"BlockRemoved" => Ok(Self::Removed),
            b"AllBlocksCleared" => Ok(Self::Cleared),
            _ => Err(Unreadable),
        }
    }
}

/// The fields of an event as they are read; what they say together is worked out when all are there.
#[derive(Default)]
struct Wire<'a> {
    hashes: Option<Hashes>,
    parent: Parent,
    tokens: Tokens,
    block_size: Option<i128>,
    lora_id: Option<i128>,
    medium: Option<&'a str>,
    lora_name: Option<&'a str>,
    extra_keys: Option<Reader<'a>>,
    group: Option<i128>,
    kind: Option<&'a str>,
    salt: Option<&'a str>,
    session_id: Option<&'a str>,
}

const STORED_FIELDS: [&[u8]; 8] = [
    b"block_hashes",
    b"parent_block_hash",
    b"token_ids",
    b"block_size",
    b"lora_id",
    b"medium",
    b"lora_name",
    b"extra_keys",
];
const REMOVED_FIELDS: [&[u8]; 3] = [b"block_hashes", b"medium", b"group_idx"];

impl<'a> Wire<'a> {
    fn read_array(&mut self, reader: &mut Reader<'a>, room: &mut Room) -> Read<Tag> {
        let members = reader.array()?.checked_sub(1).ok_or(Unreadable)?;
        let tag = Tag::read(reader)?;
        let fields: &[&[u8]] = match tag {
            Tag::Stored => &STORED_FIELDS,
            Tag::Removed => &REMOVED_FIELDS,
            Tag::Cleared => &[],
        };
        for position in 0..members {
            match fields.get(position) {
                Some(field) => self.read_field(tag, field, reader, room)?,
                None if tag == Tag::Stored && position < STORED_FIELDS.len() + 3 => self.read_tail(reader)?,
                None => reader.skip()?,
            }
        }
        self.checked(tag)
    }

    fn read_map(&mut self, reader: &mut Reader<'a>, room: &mut Room) -> Read<Tag> {
        let members = reader.map()?;
        let mut ahead = *reader;
        let mut tag = None;
        for _ in 0..members {
            if ahead.key()? == b"type" {
                tag = Some(Tag::read(&mut ahead)?);
                break;
            }
            ahead.skip()?;
        }
        let tag = tag.ok_or(Unreadable)?;
        for _ in 0..members {
            match reader.key()? {
                b"type" if Tag::read(reader)? == tag => {}
                b"type" => return Err(Unreadable),
                key => self.read_field(tag, key, reader, room)?,
            }
        }
        self.checked(tag)
    }

    fn checked(&self, tag: Tag) -> Read<Tag> {
        if tag == Tag::Cleared || self.hashes.is_some() { Ok(tag) } else { Err(Unreadable) }
    }

    fn read_field(&mut self, tag: Tag, field: &[u8], reader: &mut Reader<'a>, room: &mut Room) -> Read<()> {
        match (tag, field) {
            (Tag::Stored | Tag::Removed, b"block_hashes") => {
                self.hashes = Some(Hashes::read(reader, &mut room.hashes)?);
            }
            (Tag::Stored | Tag::Removed, b"medium") => self.medium = reader.optional_text()?,
            (Tag::Stored | Tag::Removed, b"group_idx") => self.group = reader.optional_int()?,
            (Tag::Stored, b"parent_block_hash") => self.parent = Parent::read(reader)?,
            (Tag::Stored, b"token_ids") => self.tokens = Tokens::read(reader, &mut room.tokens)?,
            (Tag::Stored, b"block_size") => self.block_size = reader.optional_int()?,
            (Tag::Stored, b"lora_id") => self.lora_id = reader.optional_int()?,
            (Tag::Stored, b"lora_name") => self.lora_name = reader.optional_text()?,
            (Tag::Stored, b"extra_keys") => self.extra_keys = read_extra_keys(reader)?,
            (Tag::Stored, b"kv_cache_spec_kind") => self.kind = reader.optional_text()?,
            (Tag::Stored, b"cache_salt") => self.salt = reader.optional_text()?,
            (Tag::Stored, b"session_id") => self.session_id = reader.optional_text()?,
            _ => reader.skip()?,
        }
        Ok(())
    }

    /// Behind the extra keys of an array event: group and kind are the first integer and the first text, other fields
    /// may stand between them.
    fn read_tail(&mut self, reader: &mut Reader<'a>) -> Read<()> {
        let mut value = *reader;
        reader.check()?;
        match value.head()? {
            Head::Str(_) if self.kind.is_some_and(|kind| !kind.is_empty()) => {}
            Head::Str(text) => self.kind = Some(std::str::from_utf8(text).map_err(|_| Unreadable)?),
            Head::Int(number) if self.kind.is_none() && self.group.is_none() => self.group = Some(number),
            Head::Bool(flag) if self.kind.is_none() && self.group.is_none() => self.group = Some(flag.into()),
            _ => {}
        }
        Ok(())
    }

    fn take_hashes(&mut self) -> Result<Range<usize>, Reason> {
        let hashes = self.hashes.take().unwrap_or_default();
        if hashes.bad { Err(Reason::BadHash) } else { Ok(hashes.range) }
    }

    fn removed(&mut self) -> Result<FoundRemoved, Reason> {
        let place = place_of(self.medium);
        Ok(FoundRemoved { hashes: self.take_hashes()?, place, group: self.group, joined: false })
    }

    fn stored(&mut self, room: &Room) -> Result<FoundStored<'a>, Reason> {
        let hashes = self.take_hashes()?;
        let parent = match self.parent {
            Parent::Root => None,
            Parent::Hash(hash) => Some(hash),
            Parent::Bad => return Err(Reason::BadHash),
        };
        if self.tokens.bad {
            return Err(Reason::BadToken);
        }
        let adapter = self.lora_name.unwrap_or("");
        let keys = self.extra_keys.map_or(Ok(ExtraKeys::default()), |keys| {
            ExtraKeys::read(keys, adapter, parent.is_none()).map_err(|_| Reason::BadField)
        })?;
        let mut stored = FoundStored {
            hashes,
            parent,
            tokens: self.tokens.range.clone(),
            block_size: self.block_size.unwrap_or(0),
            place: place_of(self.medium),
            adapter: match (self.lora_name, self.lora_id) {
                (Some(name), _) if !name.is_empty() => Some(name.into()),
                // Releases before 0.14 give the slot only: a name that no request can have keeps it apart.
                (_, Some(slot)) if slot != 0 => Some(format!("\0lora_id={slot}").into()),
                _ => None,
            },
            salt: self.salt.filter(|salt| !salt.is_empty()).or(keys.salt),
            mm: keys.mm,
            group: self.group,
            group_kind: self.kind,
            session_id: self.session_id,
            eagle: self.tokens.eagle,
            misaligned: false,
            joined: false,
        };
        stored.misaligned = is_misaligned(&stored.view(room), keys.entries);
        Ok(stored)
    }
}

/// Whether tokens cannot be cut into one block per hash. A block size that contradicts the ratio is believed only of a
/// group that is not known to be a main one (spec: user-cases A10).
fn is_misaligned(stored: &StoredView<'_>, keys: usize) -> bool {
    if stored.tokens.is_empty() {
        return false;
    }
    let (tokens, hashes) = (stored.token_count(), stored.hashes.len());
    if tokens == 0 {
        return false;
    }
    if hashes == 0 || tokens % hashes != 0 || (keys != 0 && keys != hashes) {
        return true;
    }
    let size = stored.block_size;
    size != 0 && (tokens / hashes) as i128 != size && !stored.group_kind.is_some_and(is_main_kind)
}

/// Kinds of KV-cache group whose blocks form the reusable prefix.
pub fn is_main_kind(kind: &str) -> bool {
    matches!(kind, "full_attention" | "mla_attention" | "sink_full_attention")
}

/// Where the extra keys stand, every one checked.
fn read_extra_keys<'a>(reader: &mut Reader<'a>) -> Read<Option<Reader<'a>>> {
    let start = *reader;
    match reader.head()? {
        Head::Nil => return Ok(None),
        Head::Array(count) => (0..count).try_for_each(|_| reader.check())?,
        _ => return Err(Unreadable),
    }
    Ok(Some(start))
}
