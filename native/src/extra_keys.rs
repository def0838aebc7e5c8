//! Extra keys of a stored event: what else than tokens enters a block's identity.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::hashing::multimodal_hash;
use crate::msgpack::{Head, Read, Reader, Unreadable};

/// Seed of extra keys of a kind that we do not know: they must keep blocks apart.
const OPAQUE_SEED: u64 = 2;

/// Extra keys by position, as u64 values to hash, and the salt.
///
/// vLLM publishes them untagged, in the order adapter, multimodal pairs [identifier, offset], salt (block 0 of a root
/// only), digest of prompt embeddings (spec: engine-events §2.4). Offsets are not hashed.
#[derive(Default)]
pub struct ExtraKeys<'a> {
    pub entries: usize,
    pub mm: Vec<(usize, Vec<u64>)>,
    pub salt: Option<&'a str>,
}

impl<'a> ExtraKeys<'a> {
    /// `adapter` and whether the event's first block is a root decide what an untagged key is.
    pub fn read(mut reader: Reader<'a>, adapter: &str, at_root: bool) -> Read<Self> {
        let mut keys = Self { entries: reader.array()?, ..Self::default() };
        for position in reader.nils(keys.entries)..keys.entries {
            let mut values = Vec::new();
            let may_be_salt = at_root && position == 0;
            let mut inside = reader;
            let (members, empty) = match inside.head()? {
                Head::Array(count) => {
                    reader = inside;
                    (count, false)
                }
                head => (1, is_falsy(head)),
            };
            if empty {
                reader.skip()?;
                continue;
            }
            for member in 0..members {
                keys.read_key(&mut reader, if member == 0 { adapter } else { "" }, may_be_salt, &mut values)?;
            }
            if !values.is_empty() {
                keys.mm.push((position, values));
            }
        }
        Ok(keys)
    }

    fn read_key(&mut self, reader: &mut Reader<'a>, adapter: &str, may_be_salt: bool, out: &mut Vec<u64>) -> Read<()> {
        let mut inside = *reader;
        match inside.head()? {
            Head::Str(text) if !adapter.is_empty() && text == adapter.as_bytes() => *reader = inside,
            Head::Str(text) if may_be_salt && self.salt.is_none() => {
                self.salt = Some(std::str::from_utf8(text).map_err(|_| Unreadable)?);
                *reader = inside;
            }
            Head::Array(2) => {
                if let (Head::Str(identifier), Ok(Head::Int(_) | Head::Bool(_))) = (inside.head()?, inside.head()) {
                    out.push(multimodal_hash(identifier));
                    *reader = inside;
                } else {
                    out.push(opaque(reader)?);
                }
            }
            _ => out.push(opaque(reader)?),
        }
        Ok(())
    }
}

/// Whether Python takes this value for false.
fn is_falsy(head: Head<'_>) -> bool {
    match head {
        Head::Nil
        | Head::Bool(false)
        | Head::Int(0)
        | Head::Array(0)
        | Head::Map(0)
        | Head::Str([])
        | Head::Bin([]) => true,
        Head::Float(value) => value == 0.0,
        _ => false,
    }
}

fn opaque(reader: &mut Reader<'_>) -> Read<u64> {
    let mut bytes = Vec::new();
    reader.shortest(&mut bytes)?;
    Ok(xxh3_64_with_seed(&bytes, OPAQUE_SEED))
}
