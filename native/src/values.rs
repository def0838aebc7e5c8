//! Columns of an event: block hashes and token ids. What is of the right type but cannot be used is marked as bad, for the
//! fields behind it may be of the wrong type, which weighs more.

use std::ops::Range;

use crate::hashing::TOKEN_BYTES;
use crate::msgpack::{Head, Read, Reader, Unreadable};

/// The columns of all events of a payload, one behind the other. Used again for the next payload.
#[derive(Default)]
pub struct Room {
    pub hashes: Vec<u64>,
    /// u32 little-endian.
    pub tokens: Vec<u8>,
}

/// Where an event's hashes stand, and whether one was an empty digest.
#[derive(Default)]
pub struct Hashes {
    pub range: Range<usize>,
    pub bad: bool,
}

/// The hash before the first one.
#[derive(Clone, Copy, Default)]
pub enum Parent {
    #[default]
    Root,
    Hash(u64),
    /// An empty digest.
    Bad,
}

/// Where an event's tokens stand; of bigrams (Eagle) every first one and the last second one.
#[derive(Default)]
pub struct Tokens {
    pub range: Range<usize>,
    pub eagle: bool,
    pub bad: bool,
}

impl Hashes {
    pub fn read(reader: &mut Reader<'_>, room: &mut Vec<u64>) -> Read<Self> {
        let count = reader.array()?;
        let start = room.len();
        let mut bad = false;
        room.reserve(count.min(reader.left()));
        for _ in 0..count {
            if let Some(hash) = reader.full_uint() {
                room.push(hash);
                continue;
            }
            match read_hash(reader.head()?)? {
                Some(hash) => room.push(hash),
                None => bad = true,
            }
        }
        Ok(Self { range: start..room.len(), bad })
    }
}

impl Parent {
    pub fn read(reader: &mut Reader<'_>) -> Read<Self> {
        match reader.head()? {
            Head::Nil => Ok(Self::Root),
            head => Ok(read_hash(head)?.map_or(Self::Bad, Self::Hash)),
        }
    }
}

/// As u64: a negative number is reinterpreted, of a digest the last eight bytes count; `None`: an empty digest.
fn read_hash(head: Head<'_>) -> Read<Option<u64>> {
    match head {
        Head::Int(value) => Ok(Some(value as u64)),
        Head::Bin([]) => Ok(None),
        Head::Bin(digest) => {
            let tail = &digest[digest.len().saturating_sub(8)..];
            Ok(Some(tail.iter().fold(0, |hash, byte| hash << 8 | u64::from(*byte))))
        }
        _ => Err(Unreadable),
    }
}

impl Tokens {
    pub fn read(reader: &mut Reader<'_>, room: &mut Vec<u8>) -> Read<Self> {
        let count = match reader.head()? {
            Head::Nil => 0,
            Head::Array(count) => count,
            _ => return Err(Unreadable),
        };
        let start = room.len();
        let mut tokens = Self { range: start..start, ..Self::default() };
        if count == 0 {
            return Ok(tokens);
        }
        tokens.eagle = matches!(reader.peek()?, 0x90..=0x9f | 0xdc | 0xdd);
        if tokens.eagle {
            room.reserve((count.min(reader.left()) + 1) * TOKEN_BYTES);
            tokens.read_pairs(reader, count, room)?;
        } else {
            tokens.read_singles(reader, count, room)?;
        }
        tokens.range.end = room.len();
        Ok(tokens)
    }

    fn read_singles(&mut self, reader: &mut Reader<'_>, count: usize, room: &mut Vec<u8>) -> Read<()> {
        // More than the bytes at hand are not there, whatever is claimed.
        let most = count.min(reader.left());
        let start = self.range.start;
        room.resize(start + most * TOKEN_BYTES, 0);
        let read = reader.small_uints(&mut room[start..]);
        room.truncate(start + read * TOKEN_BYTES);
        for _ in read..count {
            match reader.head()? {
                Head::Int(token) => self.push(token, room),
                Head::Array(2) => {
                    read_pair(reader)?;
                    self.bad = true;
                }
                _ => return Err(Unreadable),
            }
        }
        Ok(())
    }

    fn read_pairs(&mut self, reader: &mut Reader<'_>, count: usize, room: &mut Vec<u8>) -> Read<()> {
        let mut last = 0;
        for _ in 0..count {
            match reader.head()? {
                Head::Array(2) => {
                    let (first, second) = read_pair(reader)?;
                    self.push(first, room);
                    last = second;
                }
                Head::Int(_) => self.bad = true,
                _ => return Err(Unreadable),
            }
        }
        self.push(last, room);
        Ok(())
    }

    fn push(&mut self, token: i128, room: &mut Vec<u8>) {
        match u32::try_from(token) {
            Ok(token) => room.extend_from_slice(&token.to_le_bytes()),
            Err(_) => self.bad = true,
        }
    }
}

fn read_pair(reader: &mut Reader<'_>) -> Read<(i128, i128)> {
    match (reader.head()?, reader.head()?) {
        (Head::Int(first), Head::Int(second)) => Ok((first, second)),
        _ => Err(Unreadable),
    }
}
