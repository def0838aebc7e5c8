//! A reader of MessagePack that trusts nothing: every length is checked against the bytes at hand before it is used, and
//! nesting is bounded. It borrows from its input and allocates only what `any` writes.

use std::collections::HashMap;

/// Deepest nesting that is read. No engine nests deeper than four.
const MAX_DEPTH: u32 = 512;
const MIN_TIMESTAMP: i64 = -62_135_596_800;
const MAX_TIMESTAMP: i64 = 253_402_300_799;
const MICROS: u32 = 1_000_000;

/// The bytes are cut off, malformed, nested too deeply, or not of the type asked for.
#[derive(Debug)]
pub struct Unreadable;

pub type Read<T> = Result<T, Unreadable>;

/// One value, or the head of a container whose members follow.
#[derive(Debug, Clone, Copy)]
pub enum Head<'a> {
    Nil,
    Bool(bool),
    /// Any integer between `i64::MIN` and `u64::MAX`.
    Int(i128),
    Float(f64),
    /// Not yet known to be UTF-8.
    Str(&'a [u8]),
    Bin(&'a [u8]),
    Array(usize),
    Map(usize),
    Ext(i8, &'a [u8]),
}

/// What `any` is to do with the value that it checks.
enum Form<'o> {
    Check,
    /// Write it in its shortest encoding.
    Shortest(&'o mut Vec<u8>),
    /// Write it so that two values are equal bytes if they are equal as keys of a Python dict.
    Equal(&'o mut Vec<u8>),
}

/// How an unsigned integer of up to four bytes lies within the eight bytes from its head on; no length: it is none.
#[derive(Clone, Copy)]
struct Short {
    length: u8,
    shift: u8,
    mask: u32,
}

const SHORT: [Short; 256] = {
    let mut table = [Short { length: 0, shift: 0, mask: 0 }; 256];
    let mut first = 0;
    while first < 0x80 {
        table[first] = Short { length: 1, shift: 56, mask: 0xff };
        first += 1;
    }
    table[0xcc] = Short { length: 2, shift: 48, mask: 0xff };
    table[0xcd] = Short { length: 3, shift: 40, mask: 0xffff };
    table[0xce] = Short { length: 5, shift: 24, mask: u32::MAX };
    table
};

/// Bytes of a value without members, by its first byte; 0: it has some, or says its length itself.
const WHOLE: [u8; 256] = {
    let mut table = [0; 256];
    let mut first = 0;
    while first < 0x100 {
        table[first] = match first {
            0x00..=0x80 | 0x90 | 0xc0 | 0xc2 | 0xc3 | 0xe0..=0xff => 1,
            0xa0..=0xbf => (first & 0x1f) as u8 + 1,
            0xcc | 0xd0 => 2,
            0xcd | 0xd1 => 3,
            0xca | 0xce | 0xd2 => 5,
            0xcb | 0xcf | 0xd3 => 9,
            _ => 0,
        };
        first += 1;
    }
    table
};

#[derive(Clone, Copy)]
pub struct Reader<'a> {
    data: &'a [u8],
    pub at: usize,
}

impl<'a> Reader<'a> {
    pub fn new(data: &'a [u8]) -> Self {
        Self { data, at: 0 }
    }

    pub fn is_at_end(&self) -> bool {
        self.at == self.data.len()
    }

    /// Most values that can still follow: each takes a byte at least. Bounds every allocation.
    pub fn left(&self) -> usize {
        self.data.len() - self.at
    }

    pub fn peek(&self) -> Read<u8> {
        self.data.get(self.at).copied().ok_or(Unreadable)
    }

    pub fn next_is_map(&self) -> bool {
        matches!(self.peek(), Ok(0x80..=0x8f | 0xde | 0xdf))
    }

    fn take(&mut self, length: usize) -> Read<&'a [u8]> {
        let rest = &self.data[self.at..];
        let taken = rest.get(..length).ok_or(Unreadable)?;
        self.at += length;
        Ok(taken)
    }

    fn fixed<const N: usize>(&mut self) -> Read<[u8; N]> {
        self.take(N)?.try_into().map_err(|_| Unreadable)
    }

    /// A length of one, two or four bytes.
    fn length(&mut self, bytes: usize) -> Read<usize> {
        Ok(self.take(bytes)?.iter().fold(0, |length, byte| length << 8 | usize::from(*byte)))
    }

    fn ext(&mut self, length: usize) -> Read<Head<'a>> {
        let [code] = self.fixed()?;
        Ok(Head::Ext(code as i8, self.take(length)?))
    }

    pub fn head(&mut self) -> Read<Head<'a>> {
        let [first] = self.fixed()?;
        Ok(match first {
            0x00..=0x7f => Head::Int(first.into()),
            0x80..=0x8f => Head::Map((first & 0x0f).into()),
            0x90..=0x9f => Head::Array((first & 0x0f).into()),
            0xa0..=0xbf => Head::Str(self.take((first & 0x1f).into())?),
            0xc0 => Head::Nil,
            0xc1 => return Err(Unreadable),
            0xc2 | 0xc3 => Head::Bool(first == 0xc3),
            0xc4..=0xc6 => {
                let length = self.length(1 << (first - 0xc4))?;
                Head::Bin(self.take(length)?)
            }
            0xc7..=0xc9 => {
                let length = self.length(1 << (first - 0xc7))?;
                self.ext(length)?
            }
            0xca => Head::Float(f32::from_be_bytes(self.fixed()?).into()),
            0xcb => Head::Float(f64::from_be_bytes(self.fixed()?)),
            0xcc => Head::Int(u8::from_be_bytes(self.fixed()?).into()),
            0xcd => Head::Int(u16::from_be_bytes(self.fixed()?).into()),
            0xce => Head::Int(u32::from_be_bytes(self.fixed()?).into()),
            0xcf => Head::Int(u64::from_be_bytes(self.fixed()?).into()),
            0xd0 => Head::Int(i8::from_be_bytes(self.fixed()?).into()),
            0xd1 => Head::Int(i16::from_be_bytes(self.fixed()?).into()),
            0xd2 => Head::Int(i32::from_be_bytes(self.fixed()?).into()),
            0xd3 => Head::Int(i64::from_be_bytes(self.fixed()?).into()),
            0xd4..=0xd8 => self.ext(1 << (first - 0xd4))?,
            0xd9..=0xdb => {
                let length = self.length(1 << (first - 0xd9))?;
                Head::Str(self.take(length)?)
            }
            0xdc => Head::Array(self.length(2)?),
            0xdd => Head::Array(self.length(4)?),
            0xde => Head::Map(self.length(2)?),
            0xdf => Head::Map(self.length(4)?),
            0xe0..=0xff => Head::Int((first as i8).into()),
        })
    }

    /// As many values as there are places, while they are unsigned integers of up to four bytes, as token ids are: the
    /// fast way to what `head` would give. How many were read; places are four bytes, little-endian.
    #[inline]
    pub fn small_uints(&mut self, places: &mut [u8]) -> usize {
        let mut at = self.at;
        let mut read = 0;
        for place in places.chunks_exact_mut(4) {
            let Some(bytes) = self.data.get(at..).and_then(|rest| rest.first_chunk::<8>()) else { break };
            // Without branches: the lengths of token ids cannot be predicted.
            let Short { length, shift, mask } = SHORT[usize::from(bytes[0])];
            if length == 0 {
                break;
            }
            let value = (u64::from_be_bytes(*bytes) >> shift) as u32 & mask;
            place.copy_from_slice(&value.to_le_bytes());
            at += usize::from(length);
            read += 1;
        }
        self.at = at;
        read
    }

    /// Pass over the nils that come next, `most` at most; how many there were.
    #[inline]
    pub fn nils(&mut self, most: usize) -> usize {
        let nils = self.data[self.at..].iter().take(most).take_while(|byte| **byte == 0xc0).count();
        self.at += nils;
        nils
    }

    /// The next value if it is an unsigned integer of eight bytes, as block hashes are.
    #[inline]
    pub fn full_uint(&mut self) -> Option<u64> {
        let [0xcf, value @ ..] = *self.data.get(self.at..)?.first_chunk::<9>()? else { return None };
        self.at += 9;
        Some(u64::from_be_bytes(value))
    }

    /// Pass over one value, its structure checked, its texts not.
    #[inline]
    pub fn skip(&mut self) -> Read<()> {
        let whole = usize::from(WHOLE[usize::from(self.peek()?)]);
        if whole > 0 && whole <= self.left() {
            self.at += whole;
            return Ok(());
        }
        self.skip_within(MAX_DEPTH)
    }

    fn skip_within(&mut self, depth: u32) -> Read<()> {
        let members = match self.head()? {
            Head::Array(count) => count,
            Head::Map(count) => count * 2,
            _ => return Ok(()),
        };
        let depth = depth.checked_sub(1).ok_or(Unreadable)?;
        (0..members).try_for_each(|_| self.skip_within(depth))
    }

    pub fn array(&mut self) -> Read<usize> {
        if let Head::Array(count) = self.head()? { Ok(count) } else { Err(Unreadable) }
    }

    pub fn map(&mut self) -> Read<usize> {
        if let Head::Map(count) = self.head()? { Ok(count) } else { Err(Unreadable) }
    }

    /// The key of a field: a text, perhaps not UTF-8.
    #[inline]
    pub fn key(&mut self) -> Read<&'a [u8]> {
        let first = self.peek()?;
        if first & 0xe0 == 0xa0 {
            self.at += 1;
            return self.take((first & 0x1f).into());
        }
        if let Head::Str(key) = self.head()? { Ok(key) } else { Err(Unreadable) }
    }

    pub fn text(&mut self) -> Read<&'a str> {
        std::str::from_utf8(self.key()?).map_err(|_| Unreadable)
    }

    #[inline]
    pub fn optional_text(&mut self) -> Read<Option<&'a str>> {
        if self.peek()? == 0xc0 {
            self.at += 1;
            return Ok(None);
        }
        match self.head()? {
            Head::Nil => Ok(None),
            Head::Str(text) => std::str::from_utf8(text).map(Some).map_err(|_| Unreadable),
            _ => Err(Unreadable),
        }
    }

    pub fn optional_int(&mut self) -> Read<Option<i128>> {
        match self.head()? {
            Head::Nil => Ok(None),
            Head::Int(value) => Ok(Some(value)),
            _ => Err(Unreadable),
        }
    }

    pub fn float(&mut self) -> Read<f64> {
        match self.head()? {
            Head::Float(value) => Ok(value),
            Head::Int(value) => Ok(value as f64),
            _ => Err(Unreadable),
        }
    }

    /// Check one value of any type as the Python twin's decoder does: texts are UTF-8, keys of maps hashable, timestamps
    /// in range.
    pub fn check(&mut self) -> Read<()> {
        self.any(&mut Form::Check, false, MAX_DEPTH)
    }

    /// The same, and write it in its shortest encoding.
    pub fn shortest(&mut self, out: &mut Vec<u8>) -> Read<()> {
        self.any(&mut Form::Shortest(out), false, MAX_DEPTH)
    }

    fn any(&mut self, form: &mut Form<'_>, in_key: bool, depth: u32) -> Read<()> {
        let depth = depth.checked_sub(1).ok_or(Unreadable)?;
        let head = self.head()?;
        match head {
            Head::Str(text) => drop(std::str::from_utf8(text).map_err(|_| Unreadable)?),
            Head::Map(_) if in_key => return Err(Unreadable),
            Head::Map(count) => return self.any_map(count, form, depth),
            Head::Array(count) => {
                if let Some(out) = form.out() {
                    write_head(out, head);
                }
                return (0..count).try_for_each(|_| self.any(form, in_key, depth));
            }
            Head::Ext(-1, time) => {
                let (seconds, micros) = timestamp(time)?;
                if let Some(out) = form.out() {
                    write_timestamp(out, seconds, micros);
                }
                return Ok(());
            }
            Head::Ext(..) if in_key => return Err(Unreadable),
            _ => {}
        }
        match form {
            Form::Check => {}
            Form::Shortest(out) => write_head(out, head),
            Form::Equal(out) => match head {
                Head::Bool(value) => write_head(out, Head::Int(value.into())),
                Head::Float(value) if value.fract() == 0.0 && value.abs() < 2f64.powi(64) => {
                    write_head(out, Head::Int(value as i128));
                }
                Head::Float(value) if value.is_nan() => {
                    write_head(out, head);
                    out.extend(self.at.to_le_bytes()); // equal to no other
                }
                _ => write_head(out, head),
            },
        }
        Ok(())
    }

    fn any_map(&mut self, count: usize, form: &mut Form<'_>, depth: u32) -> Read<()> {
        let Some(out) = form.out() else {
            return (0..count).try_for_each(|_| {
                self.any(form, true, depth)?;
                self.any(form, false, depth)
            });
        };
        // A key that comes again keeps its place and its first form, and takes the last value.
        let mut places: HashMap<Vec<u8>, usize> = HashMap::new();
        let mut members: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
        for _ in 0..count {
            let (mut equal, mut key, mut value) = (Vec::new(), Vec::new(), Vec::new());
            let start = self.at;
            self.any(&mut Form::Equal(&mut equal), true, depth)?;
            self.at = start;
            self.any(&mut Form::Shortest(&mut key), true, depth)?;
            self.any(&mut Form::Shortest(&mut value), false, depth)?;
            let place = *places.entry(equal).or_insert(members.len());
            match members.get_mut(place) {
                Some(member) => member.1 = value,
                None => members.push((key, value)),
            }
        }
        write_head(out, Head::Map(members.len()));
        for (key, value) in members {
            out.extend(key);
            out.extend(value);
        }
        Ok(())
    }
}

impl Form<'_> {
    fn out(&mut self) -> Option<&mut Vec<u8>> {
        match self {
            Form::Check => None,
            Form::Shortest(out) | Form::Equal(out) => Some(out),
        }
    }
}

/// Seconds and microseconds of a timestamp, rounded half up.
fn timestamp(data: &[u8]) -> Read<(i64, u32)> {
    let (seconds, nanos) = match data.len() {
        4 => (u32::from_be_bytes(data.try_into().map_err(|_| Unreadable)?).into(), 0),
        8 => {
            let value = u64::from_be_bytes(data.try_into().map_err(|_| Unreadable)?);
            ((value & ((1 << 34) - 1)) as i64, (value >> 34) as u32)
        }
        12 => {
            let nanos = u32::from_be_bytes(data[..4].try_into().map_err(|_| Unreadable)?);
            (i64::from_be_bytes(data[4..].try_into().map_err(|_| Unreadable)?), nanos)
        }
        _ => return Err(Unreadable),
    };
    if nanos > 999_999_999 {
        return Err(Unreadable);
    }
    let micros = (nanos + 500) / 1000;
    let (seconds, micros) = if micros == MICROS { (seconds.saturating_add(1), 0) } else { (seconds, micros) };
    if (MIN_TIMESTAMP..=MAX_TIMESTAMP).contains(&seconds) { Ok((seconds, micros)) } else { Err(Unreadable) }
}

fn write_timestamp(out: &mut Vec<u8>, seconds: i64, micros: u32) {
    let nanos = micros * 1000;
    if let (Ok(seconds), 0) = (u32::try_from(seconds), nanos) {
        write_head(out, Head::Ext(-1, &seconds.to_be_bytes()));
    } else if (0..1 << 34).contains(&seconds) {
        write_head(out, Head::Ext(-1, &(u64::from(nanos) << 34 | seconds as u64).to_be_bytes()));
    } else {
        let mut data = [0; 12];
        data[..4].copy_from_slice(&nanos.to_be_bytes());
        data[4..].copy_from_slice(&seconds.to_be_bytes());
        write_head(out, Head::Ext(-1, &data));
    }
}

/// The shortest encoding of a scalar, or of a container's head.
pub fn write_head(out: &mut Vec<u8>, head: Head<'_>) {
    match head {
        Head::Nil => out.push(0xc0),
        Head::Bool(value) => out.push(0xc2 | u8::from(value)),
        Head::Int(value) => write_int(out, value),
        Head::Float(value) => {
            out.push(0xcb);
            out.extend(value.to_be_bytes());
        }
        Head::Str(text) => {
            write_length(out, text.len(), Some((0xa0, 32)), [Some(0xd9), Some(0xda), Some(0xdb)]);
            out.extend(text);
        }
        Head::Bin(data) => {
            write_length(out, data.len(), None, [Some(0xc4), Some(0xc5), Some(0xc6)]);
            out.extend(data);
        }
        Head::Array(count) => write_length(out, count, Some((0x90, 16)), [None, Some(0xdc), Some(0xdd)]),
        Head::Map(count) => write_length(out, count, Some((0x80, 16)), [None, Some(0xde), Some(0xdf)]),
        Head::Ext(code, data) => {
            match data.len() {
                length @ (1 | 2 | 4 | 8 | 16) => out.push(0xd4 + length.trailing_zeros() as u8),
                length => write_length(out, length, None, [Some(0xc7), Some(0xc8), Some(0xc9)]),
            }
            out.push(code as u8);
            out.extend(data);
        }
    }
}

/// A length behind the shortest of its heads: in the head itself (first value and number of lengths), or in one, two or
/// four bytes after it.
fn write_length(out: &mut Vec<u8>, length: usize, inline: Option<(u8, usize)>, heads: [Option<u8>; 3]) {
    if let Some((first, _)) = inline.filter(|(_, lengths)| length < *lengths) {
        return out.push(first | length as u8);
    }
    match heads {
        [Some(head), _, _] if length <= 0xff => out.extend([head, length as u8]),
        [_, Some(head), _] if length <= 0xffff => {
            out.push(head);
            out.extend((length as u16).to_be_bytes());
        }
        [_, _, head] => {
            out.extend(head);
            out.extend((length as u32).to_be_bytes());
        }
    }
}

fn write_int(out: &mut Vec<u8>, value: i128) {
    match value {
        -32..=0x7f => out.push(value as u8),
        0x80..=0xff => out.extend([0xcc, value as u8]),
        0x100..=0xffff => {
            out.push(0xcd);
            out.extend((value as u16).to_be_bytes());
        }
        0x1_0000..=0xffff_ffff => {
            out.push(0xce);
            out.extend((value as u32).to_be_bytes());
        }
        0x1_0000_0000.. => {
            out.push(0xcf);
            out.extend((value as u64).to_be_bytes());
        }
        -0x80..=-33 => out.extend([0xd0, value as u8]),
        -0x8000..=-0x81 => {
            out.push(0xd1);
            out.extend((value as i16).to_be_bytes());
        }
        -0x8000_0000..=-0x8001 => {
            out.push(0xd2);
            out.extend((value as i32).to_be_bytes());
        }
        _ => {
            out.push(0xd3);
            out.extend((value as i64).to_be_bytes());
        }
    }
}
