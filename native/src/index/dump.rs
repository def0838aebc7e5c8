//! A dump of the index, the format of `kvcore/dump.py`: MessagePack around packed columns, version 1.
//!
//! Dumping and loading go in steps of some `SLICE` blocks. Bytes are not trusted: every length is checked against the bytes
//! at hand before anything is made of it.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use super::blocks::Identity;
use super::masks::Masks;
use super::ranks::{MAX_GROUPS, Rank};
use super::residency::Residency;
use super::waiting::{read_flag, read_stored, write_stored};
use crate::events::Stored;
use crate::hashing::TOKEN_BYTES;
use crate::msgpack::{Head, Read, Reader, Unreadable, write_head};

const SLICE: usize = 2048;
const VERSION: i128 = 1;
const TAG: &[u8] = b"tidegate.index";
const CONTRADICTION: &str = "a column of a group names what another does not have";

/// Why a dump is refused, a sentence.
pub type Refused = String;

/// One rank of a dump.
pub struct RankDump {
    pub worker: String,
    pub rank: i64,
    pub groups: Vec<(i128, GroupDump)>,
    pub other_kinds: Vec<(i128, String)>,
}

/// One group: where its columns stand in the bytes.
#[derive(Default)]
pub struct GroupDump {
    block_size: Option<u64>,
    connector_copies: u64,
    engines: Range<usize>,
    numbers: Range<usize>,
    copies: Range<usize>,
    owns: Range<usize>,
    parents: Range<usize>,
    roots: Range<usize>,
    seeds: Range<usize>,
    seed_values: Vec<u64>,
    waiting: Vec<Arc<Stored>>,
    ambiguous: bool,
}

/// Read a dump and check every length; `Loader` checks the rest.
pub fn read_dump(data: &[u8]) -> Result<Vec<RankDump>, Refused> {
    let mut reader = Reader::new(data);
    let read = read_index(&mut reader);
    let (ranks, version) =
        read.ok().filter(|_| reader.is_at_end()).ok_or_else(|| format!("not an index dump: byte {}", reader.at))?;
    if version != VERSION {
        return Err(format!("index dump of version {version}, not {VERSION}"));
    }
    let mut keys: Vec<_> = ranks.iter().map(|rank| (&rank.worker, rank.rank)).collect();
    keys.sort_unstable();
    if keys.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err("a rank stands twice in the dump".into());
    }
    ranks.iter().flat_map(|rank| &rank.groups).try_for_each(|(_, group)| group.check())?;
    Ok(ranks)
}

fn read_index(reader: &mut Reader<'_>) -> Read<(Vec<RankDump>, i128)> {
    let members = reader.array()?;
    if members < 2 || reader.key()? != TAG {
        return Err(Unreadable);
    }
    let mut ranks = Vec::new();
    for _ in 0..reader.array()? {
        ranks.push(read_rank(reader)?);
    }
    let version = if members > 2 { reader.optional_int()?.ok_or(Unreadable)? } else { VERSION };
    (3..members).try_for_each(|_| reader.skip())?;
    Ok((ranks, version))
}

fn read_rank(reader: &mut Reader<'_>) -> Read<RankDump> {
    let (mut worker, mut number, mut groups, mut other_kinds) = (None, None, None, None);
    for _ in 0..reader.map()? {
        match reader.key()? {
            b"worker" => worker = Some(reader.text()?.to_owned()),
            b"rank" => number = u32::try_from(int(reader)?).ok().map(i64::from),
            b"groups" => groups = Some(read_numbered(reader, read_group)?),
            b"other_kinds" => other_kinds = Some(read_numbered(reader, |reader| Ok(reader.text()?.to_owned()))?),
            _ => reader.skip()?,
        }
    }
    match (worker, number, groups, other_kinds) {
        (Some(worker), Some(rank), Some(groups), Some(other_kinds)) => {
            Ok(RankDump { worker, rank, groups, other_kinds })
        }
        _ => Err(Unreadable),
    }
}

/// A map of few numbers, each once.
fn read_numbered<'a, T>(
    reader: &mut Reader<'a>,
    mut read: impl FnMut(&mut Reader<'a>) -> Read<T>,
) -> Read<Vec<(i128, T)>> {
    let mut members: Vec<(i128, T)> = Vec::new();
    let count = reader.map()?;
    if count > MAX_GROUPS {
        return Err(Unreadable);
    }
    for _ in 0..count {
        let number = int(reader)?;
        let member = read(reader)?;
        match members.iter_mut().find(|(other, _)| *other == number) {
            Some((_, earlier)) => *earlier = member,
            None => members.push((number, member)),
        }
    }
    Ok(members)
}

fn int(reader: &mut Reader<'_>) -> Read<i128> {
    reader.optional_int()?.ok_or(Unreadable)
}

fn unsigned(reader: &mut Reader<'_>) -> Read<u64> {
    u64::try_from(int(reader)?).map_err(|_| Unreadable)
}

fn read_group(reader: &mut Reader<'_>) -> Read<GroupDump> {
    let mut group = GroupDump::default();
    let mut seen = 0u16;
    for _ in 0..reader.map()? {
        let field = match reader.key()? {
            b"block_size" => {
                group.block_size = match reader.optional_int()? {
                    None => None,
                    Some(size) => Some(u32::try_from(size).ok().filter(|size| *size > 0).ok_or(Unreadable)?.into()),
                };
                0
            }
            b"connector_copies" => {
                group.connector_copies = unsigned(reader)?;
                1
            }
            b"engines" => column(reader, &mut group.engines, 2)?,
            b"numbers" => column(reader, &mut group.numbers, 3)?,
            b"copies" => column(reader, &mut group.copies, 4)?,
            b"owns" => column(reader, &mut group.owns, 5)?,
            b"parents" => column(reader, &mut group.parents, 6)?,
            b"roots" => column(reader, &mut group.roots, 7)?,
            b"seeds" => column(reader, &mut group.seeds, 8)?,
            b"seed_values" => {
                let count = reader.array()?;
                group.seed_values = (0..count).map(|_| unsigned(reader)).collect::<Read<_>>()?;
                9
            }
            b"ambiguous" => {
                group.ambiguous = read_flag(reader)?;
                continue;
            }
            b"waiting" => {
                let count = reader.array()?;
                group.waiting = (0..count).map(|_| read_stored(reader).map(Arc::new)).collect::<Read<_>>()?;
                10
            }
            _ => {
                reader.skip()?;
                continue;
            }
        };
        seen |= 1 << field;
    }
    if seen == (1 << 11) - 1 { Ok(group) } else { Err(Unreadable) }
}

fn column(reader: &mut Reader<'_>, column: &mut Range<usize>, field: u8) -> Read<u8> {
    let Head::Bin(data) = reader.head()? else { return Err(Unreadable) };
    *column = reader.at - data.len()..reader.at;
    Ok(field)
}

impl GroupDump {
    fn check(&self) -> Result<(), Refused> {
        let length = |column: &Range<usize>, size: usize| match column.len() % size {
            0 => Ok(column.len() / size),
            _ => Err(format!("a packed column is cut off: {} bytes", column.len())),
        };
        let (engines, numbers, copies) =
            (length(&self.engines, 8)?, length(&self.numbers, 4)?, length(&self.copies, 8)?);
        let (owns, parents, seeds) = (length(&self.owns, 8)?, length(&self.parents, 8)?, length(&self.seeds, 4)?);
        let right =
            numbers == engines && parents == owns && seeds == owns && self.roots.len() == owns && owns <= copies;
        if !right {
            return Err("the columns of a group contradict each other".into());
        }
        if !self.waiting.iter().all(|event| self.may_wait(event)) {
            return Err("an event that waits is none that could be applied".into());
        }
        Ok(())
    }

    /// Whether a group of this block size could have kept the event, so that it can be applied later.
    fn may_wait(&self, event: &Stored) -> bool {
        let size = event.tokens_per_block();
        let aligned = event.tokens.is_empty()
            || (Some(size as u64) == self.block_size
                && event.tokens.len() == TOKEN_BYTES * (size * event.hashes.len() + usize::from(event.eagle)));
        !event.hashes.is_empty() && aligned && !event.misaligned
    }
}

/// Fills an empty group from a dump.
pub struct Loader {
    dump: GroupDump,
    at: usize,
    blocks: Vec<u32>,
    named: Vec<bool>,
}

fn u64_at(data: &[u8], column: &Range<usize>, at: usize) -> u64 {
    let place = column.start + at * 8;
    data.get(place..place + 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes)
}

fn u32_at(data: &[u8], column: &Range<usize>, at: usize) -> u32 {
    let place = column.start + at * 4;
    data.get(place..place + 4).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_le_bytes)
}

impl Loader {
    pub fn new(dump: GroupDump, group: &mut Residency) -> Self {
        group.block_size = dump.block_size;
        group.connector_copies = dump.connector_copies;
        group.ambiguous = dump.ambiguous;
        Self { dump, at: 0, blocks: Vec::new(), named: Vec::new() }
    }

    /// Some blocks more; whether the group is complete.
    pub fn step(&mut self, data: &[u8], group: &mut Residency, masks: &mut Masks) -> Result<bool, Refused> {
        let (copies, engines) = (self.dump.copies.len() / 8, self.dump.engines.len() / 8);
        let end = copies + 2 * engines;
        let stop = end.min(self.at + SLICE);
        while self.at < stop {
            if let Some(at) = self.at.checked_sub(copies + engines) {
                let number = u32_at(data, &self.dump.numbers, at) as usize;
                group.restore(masks, u64_at(data, &self.dump.engines, at), u64_at(data, &self.dump.copies, number));
            } else if let Some(at) = self.at.checked_sub(copies) {
                let engine = u64_at(data, &self.dump.engines, at);
                let number = u32_at(data, &self.dump.numbers, at) as usize;
                let block = *self.blocks.get(number).ok_or(CONTRADICTION)?;
                if group.blocks.get(engine).is_some() {
                    return Err("an engine hash stands twice in a group".into());
                }
                group.blocks.name_it(engine, block);
                self.named[number] = true;
            } else {
                self.blocks.push(group.blocks.add_unnamed(self.identity(data, self.at)?));
                self.named.push(false);
            }
            self.at += 1;
            if self.at == copies + engines {
                // What nobody names is not there.
                let blocks = self.blocks.iter().zip(&self.named);
                blocks.filter(|(_, named)| !**named).for_each(|(block, _)| group.blocks.drop_block(*block));
            }
        }
        if self.at < end {
            return Ok(false);
        }
        self.dump.waiting.drain(..).for_each(|event| group.hold(event));
        Ok(true)
    }

    /// Of a block, `None` for one without.
    fn identity(&self, data: &[u8], at: usize) -> Result<Option<Identity>, Refused> {
        let dump = &self.dump;
        if at >= dump.owns.len() / 8 {
            return Ok(None);
        }
        let seed = *dump.seed_values.get(u32_at(data, &dump.seeds, at) as usize).ok_or(CONTRADICTION)?;
        let is_root = data.get(dump.roots.start + at).is_some_and(|root| *root != 0);
        let parent = (!is_root).then(|| u64_at(data, &dump.parents, at));
        Ok(Some(Identity { own: u64_at(data, &dump.owns, at), seed, parent }))
    }
}

/// Begin a dump of so many ranks.
pub fn write_start(out: &mut Vec<u8>, ranks: usize) {
    write_head(out, Head::Array(3));
    write_head(out, Head::Str(TAG));
    write_head(out, Head::Array(ranks));
}

/// Begin a rank; its groups follow, then `write_other_kinds`.
pub fn write_rank(out: &mut Vec<u8>, rank: &Rank) {
    write_head(out, Head::Map(4));
    write_head(out, Head::Str(b"worker"));
    write_head(out, Head::Str(rank.key.worker.as_bytes()));
    write_head(out, Head::Str(b"rank"));
    write_head(out, Head::Int(rank.key.rank.into()));
    write_head(out, Head::Str(b"groups"));
    write_head(out, Head::Map(rank.groups.len()));
}

pub fn write_other_kinds(out: &mut Vec<u8>, rank: &Rank) {
    write_head(out, Head::Str(b"other_kinds"));
    write_head(out, Head::Map(rank.other_kinds.len()));
    for (number, kind) in &rank.other_kinds {
        write_head(out, Head::Int(*number));
        write_head(out, Head::Str(kind.as_bytes()));
    }
}

pub fn write_end(out: &mut Vec<u8>) {
    write_head(out, Head::Int(VERSION));
}

/// Writes one group.
#[derive(Default)]
pub struct Dumper {
    at: u32,
    /// Place of each block in the dump.
    places: Vec<u32>,
    nameless: Vec<u32>,
    nameless_at: Vec<usize>,
    known: usize,
    engines: Vec<u8>,
    numbers: Vec<u8>,
    copies: Vec<u8>,
    owns: Vec<u8>,
    parents: Vec<u8>,
    roots: Vec<u8>,
    seeds: Vec<u8>,
    seed_values: Vec<u64>,
    seed_places: HashMap<u64, u32>,
}

impl Dumper {
    /// Some blocks more; whether these were all.
    pub fn step(&mut self, group: &Residency) -> bool {
        let blocks = &group.blocks;
        self.places.resize(blocks.end() as usize, u32::MAX);
        let stop = blocks.end().min(self.at + SLICE as u32);
        for number in self.at..stop {
            let Some((engine, block)) = blocks.named(number) else { continue };
            self.engines.extend(engine.to_le_bytes());
            let place = &mut self.places[block as usize];
            if let Some(own) = blocks.own(block) {
                if *place == u32::MAX {
                    *place = self.known as u32;
                    self.known += 1;
                    self.owns.extend(own.to_le_bytes());
                    self.copies.extend(blocks.copies(block).to_le_bytes());
                    self.parents.extend(blocks.parent(block).unwrap_or(0).to_le_bytes());
                    self.roots.push(u8::from(blocks.parent(block).is_none()));
                    let seed = blocks.seed(block);
                    let seed = *self.seed_places.entry(seed).or_insert_with(|| {
                        self.seed_values.push(seed);
                        self.seed_values.len() as u32 - 1
                    });
                    self.seeds.extend(seed.to_le_bytes());
                }
            } else {
                self.nameless_at.push(self.numbers.len());
                if *place == u32::MAX {
                    *place = self.nameless.len() as u32;
                    self.nameless.push(block);
                }
            }
            self.numbers.extend(place.to_le_bytes());
        }
        self.at = stop;
        stop == blocks.end()
    }

    /// The group under its number, after its last step.
    pub fn write(mut self, number: i128, group: &Residency, out: &mut Vec<u8>) {
        for at in self.nameless_at {
            let place = u32_at(&self.numbers, &(0..self.numbers.len()), at / 4) + self.known as u32;
            self.numbers[at..at + 4].copy_from_slice(&place.to_le_bytes());
        }
        for block in self.nameless {
            self.copies.extend(group.blocks.copies(block).to_le_bytes());
        }
        write_head(out, Head::Int(number));
        write_head(out, Head::Map(12));
        write_head(out, Head::Str(b"block_size"));
        write_head(out, group.block_size.map_or(Head::Nil, |size| Head::Int(size.into())));
        write_head(out, Head::Str(b"connector_copies"));
        write_head(out, Head::Int(group.connector_copies.into()));
        let columns: [(&[u8], Vec<u8>); 7] = [
            (b"engines", self.engines),
            (b"numbers", self.numbers),
            (b"copies", self.copies),
            (b"owns", self.owns),
            (b"parents", self.parents),
            (b"roots", self.roots),
            (b"seeds", self.seeds),
        ];
        for (name, column) in columns {
            write_head(out, Head::Str(name));
            write_head(out, Head::Bin(&column));
        }
        write_head(out, Head::Str(b"seed_values"));
        write_head(out, Head::Array(self.seed_values.len()));
        self.seed_values.iter().for_each(|seed| write_head(out, Head::Int((*seed).into())));
        write_head(out, Head::Str(b"ambiguous"));
        write_head(out, Head::Bool(group.ambiguous));
        write_head(out, Head::Str(b"waiting"));
        write_head(out, Head::Array(group.held_events().count()));
        group.held_events().for_each(|event| write_stored(out, event));
    }
}
