//! One message of a Mooncake master, as `kvcore/pool_events.py` reads it (spec: pool-events §1).
//!
//! Fields are read by name, whatever else a dialect sends is passed over. Nothing is copied: events are parts of the
//! payload.

use crate::events::MAX_PAYLOAD_BYTES;
use crate::msgpack::{Read, Reader, Unreadable};

const DEFAULT_TENANT: &str = "default";
pub const MAX_MEDIUM_BYTES: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Stored,
    Removed,
    Cleared,
}

/// One event; `medium` as it stands there, empty: not said.
#[derive(Debug, Clone, Copy)]
pub struct PoolEvent<'a> {
    pub kind: Kind,
    pub tenant: &'a str,
    pub key: &'a str,
    pub medium: &'a str,
}

/// Why something is left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    BadField,
    UnknownType,
    NoKey,
    TooManyComponents,
    TooManyMedia,
}

impl Reason {
    pub const ALL: [Self; 5] =
        [Self::BadField, Self::UnknownType, Self::NoKey, Self::TooManyComponents, Self::TooManyMedia];

    pub const fn name(self) -> &'static str {
        match self {
            Self::BadField => "bad_field",
            Self::UnknownType => "unknown_type",
            Self::NoKey => "no_key",
            Self::TooManyComponents => "too_many_components",
            Self::TooManyMedia => "too_many_media",
        }
    }
}

/// The events of one message, in order.
#[derive(Default)]
pub struct PoolBatch<'a> {
    pub events: Vec<Result<PoolEvent<'a>, Reason>>,
    /// The last one that an event named.
    pub backend_id: Option<&'a str>,
}

#[derive(Default)]
struct Fields<'a> {
    event_type: Option<&'a str>,
    other_type: Option<&'a str>,
    tenant: &'a str,
    medium: &'a str,
    key: &'a str,
    backend_id: &'a str,
}

/// Decode a message's last frame; the error is a sentence.
pub fn decode_pool_batch(payload: &[u8], max_key_bytes: usize) -> Result<PoolBatch<'_>, String> {
    let length = payload.len();
    if length > MAX_PAYLOAD_BYTES {
        return Err(format!("a payload of {length} bytes exceeds the limit of {MAX_PAYLOAD_BYTES} bytes"));
    }
    let mut reader = Reader::new(payload);
    match read_batch(&mut reader, max_key_bytes) {
        Ok(batch) if reader.is_at_end() => Ok(batch),
        _ => Err(format!("not a batch of pool events: byte {}", reader.at)),
    }
}

fn read_batch<'a>(reader: &mut Reader<'a>, max_key_bytes: usize) -> Read<PoolBatch<'a>> {
    let members = reader.array()?;
    if members < 2 {
        return Err(Unreadable);
    }
    reader.float()?;
    let count = reader.array()?;
    let mut batch = PoolBatch::default();
    batch.events.reserve(count.min(reader.left()));
    for _ in 0..count {
        let start = *reader;
        let event = if let Ok(fields) = read_fields(reader) {
            event_of(&fields, max_key_bytes).inspect(|_| {
                if !fields.backend_id.is_empty() {
                    batch.backend_id = Some(fields.backend_id);
                }
            })
        } else {
            *reader = start;
            reader.skip()?;
            Err(Reason::BadField)
        };
        batch.events.push(event);
    }
    (2..members).try_for_each(|_| reader.skip())?;
    Ok(batch)
}

#[inline]
fn read_fields<'a>(reader: &mut Reader<'a>) -> Read<Fields<'a>> {
    let mut fields = Fields::default();
    for _ in 0..reader.map()? {
        match reader.key()? {
            b"object_key" => fields.key = reader.optional_text()?.unwrap_or(""),
            b"event_type" => fields.event_type = reader.optional_text()?,
            b"type" => fields.other_type = reader.optional_text()?,
            b"tenant_id" => fields.tenant = reader.optional_text()?.unwrap_or(""),
            b"medium" => fields.medium = reader.optional_text()?.unwrap_or(""),
            b"backend_id" => fields.backend_id = reader.optional_text()?.unwrap_or(""),
            _ => reader.skip()?,
        }
    }
    Ok(fields)
}

fn event_of<'a>(fields: &Fields<'a>, max_key_bytes: usize) -> Result<PoolEvent<'a>, Reason> {
    let kind = match (fields.event_type, fields.other_type) {
        (Some("stored"), _) | (None, Some("BlockStored")) => Kind::Stored,
        (Some("removed"), _) | (None, Some("BlockRemoved")) => Kind::Removed,
        (Some("cleared"), _) | (None, Some("AllBlocksCleared")) => Kind::Cleared,
        _ => return Err(Reason::UnknownType),
    };
    let tenant = if fields.tenant.is_empty() { DEFAULT_TENANT } else { fields.tenant };
    let is_long = tenant.len().max(fields.backend_id.len()) > max_key_bytes;
    if is_long || fields.medium.len() > MAX_MEDIUM_BYTES {
        return Err(Reason::BadField);
    }
    if kind != Kind::Cleared && fields.key.is_empty() {
        return Err(Reason::NoKey);
    }
    Ok(PoolEvent { kind, tenant, key: fields.key, medium: fields.medium })
}
