//! Stored events that wait, within a dump: maps with the fields of `kvcore.events.Stored`.

use crate::events::Stored;
use crate::hashing::TOKEN_BYTES;
use crate::media::Place;
use crate::msgpack::{Head, Read, Reader, Unreadable, write_head};

/// Read one event. What could not wait is refused.
pub fn read_stored(reader: &mut Reader<'_>) -> Read<Stored> {
    let mut stored = Stored::default();
    let mut has_hashes = false;
    for _ in 0..reader.map()? {
        match reader.key()? {
            b"hashes" => {
                stored.hashes = read_hashes(reader)?;
                has_hashes = true;
            }
            b"parent" => {
                stored.parent = match reader.optional_int()? {
                    None => None,
                    Some(hash) => Some(u64::try_from(hash).map_err(|_| Unreadable)?),
                }
            }
            b"tokens" => match reader.head()? {
                Head::Bin(tokens) => stored.tokens = tokens.to_vec(),
                _ => return Err(Unreadable),
            },
            b"block_size" => stored.block_size = reader.optional_int()?.ok_or(Unreadable)?,
            b"tier" => stored.place = Place { tier: read_tier(reader)?, ..stored.place },
            b"connector" => stored.place.connector = read_flag(reader)?,
            b"adapter" => stored.adapter = reader.optional_text()?.map(str::to_owned),
            b"salt" => stored.salt = reader.optional_text()?.map(str::to_owned),
            b"mm" => {
                for _ in 0..reader.map()? {
                    let position = reader.optional_int()?.ok_or(Unreadable)?;
                    let objects = read_hashes(reader)?;
                    if let Ok(position) = usize::try_from(position) {
                        stored.mm.push((position, objects));
                    }
                }
            }
            b"group" => stored.group = reader.optional_int()?,
            b"group_kind" => stored.group_kind = reader.optional_text()?.map(str::to_owned),
            b"session_id" => stored.session_id = reader.optional_text()?.map(str::to_owned),
            b"eagle" => stored.eagle = read_flag(reader)?,
            b"misaligned" => stored.misaligned = read_flag(reader)?,
            _ => reader.skip()?,
        }
    }
    stored.mm.sort_unstable_by_key(|(position, _)| *position);
    let usable = has_hashes && stored.tokens.len().is_multiple_of(TOKEN_BYTES) && stored.is_whole();
    if usable { Ok(stored) } else { Err(Unreadable) }
}

fn read_hashes(reader: &mut Reader<'_>) -> Read<Vec<u64>> {
    let count = reader.array()?;
    let hash = |_| u64::try_from(reader.optional_int()?.ok_or(Unreadable)?).map_err(|_| Unreadable);
    (0..count).map(hash).collect()
}

fn read_tier(reader: &mut Reader<'_>) -> Read<u8> {
    match reader.head()? {
        Head::Int(tier @ 0..=3) => Ok(tier as u8),
        _ => Err(Unreadable),
    }
}

pub fn read_flag(reader: &mut Reader<'_>) -> Read<bool> {
    if let Head::Bool(flag) = reader.head()? { Ok(flag) } else { Err(Unreadable) }
}

pub fn write_stored(out: &mut Vec<u8>, event: &Stored) {
    write_head(out, Head::Map(14));
    let mut field = |name: &str, head: Head<'_>| {
        write_head(out, Head::Str(name.as_bytes()));
        write_head(out, head);
    };
    field("parent", event.parent.map_or(Head::Nil, |hash| Head::Int(hash.into())));
    field("tokens", Head::Bin(&event.tokens));
    field("block_size", Head::Int(event.block_size));
    field("tier", Head::Int(event.place.tier.into()));
    field("connector", Head::Bool(event.place.connector));
    for (name, text) in [
        ("adapter", &event.adapter),
        ("salt", &event.salt),
        ("group_kind", &event.group_kind),
        ("session_id", &event.session_id),
    ] {
        field(name, text.as_ref().map_or(Head::Nil, |text| Head::Str(text.as_bytes())));
    }
    field("group", event.group.map_or(Head::Nil, Head::Int));
    field("eagle", Head::Bool(event.eagle));
    field("misaligned", Head::Bool(event.misaligned));
    field("hashes", Head::Array(event.hashes.len()));
    event.hashes.iter().for_each(|hash| write_head(out, Head::Int((*hash).into())));
    write_head(out, Head::Str(b"mm"));
    write_head(out, Head::Map(event.mm.len()));
    for (position, objects) in &event.mm {
        write_head(out, Head::Int(*position as i128));
        write_head(out, Head::Array(objects.len()));
        for object in objects {
            write_head(out, Head::Int((*object).into()));
        }
    }
}
