//! Bytes of dumps and deltas: the format of `kvcore/pool_dump.py`, version 1.
//!
//! Nothing is trusted: every length is checked against the bytes at hand before anything is made of it.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use super::events::MAX_MEDIUM_BYTES;
use super::index::{ENTRY_BYTES, MAX_MEDIA, entry_of};
use super::keys::{MAX_COMPONENT_BYTES, Scheme};
use super::pages::Page;
use super::space::Identity;
use super::states::Object;

pub const DUMP: [u8; 4] = *b"TGPI";
pub const DELTA: [u8; 4] = *b"TGPD";
const VERSION: u8 = 1;
pub const BAD_PAGES: &str = "a page twice, or of a pattern that is not there";

/// A dump or a delta.
pub struct File {
    pub media: Vec<String>,
    pub parts: Vec<Part>,
}

/// One identity's part. `pages`: where the entries of page and pattern stand, not yet checked.
pub struct Part {
    pub tenant: String,
    pub scheme: Scheme,
    pub prefix: String,
    pub components: Vec<String>,
    pub patterns: Vec<Vec<Object>>,
    pub pages: Range<usize>,
}

/// Read all of it but the pages; the error is a sentence.
pub fn read(magic: [u8; 4], data: &[u8]) -> Result<File, String> {
    let mut reader = Bytes { data, at: 0 };
    if reader.fixed()? != magic {
        return Err(format!("does not begin with {}", String::from_utf8_lossy(&magic)));
    }
    let version = reader.u8()?;
    if version != VERSION {
        return Err(format!("version {version}, not {VERSION}"));
    }
    let count = usize::from(reader.u8()?);
    let media = (0..count).map(|_| reader.text(MAX_MEDIUM_BYTES)).collect::<Result<Vec<_>, _>>()?;
    if !(1..=MAX_MEDIA).contains(&count) || media.iter().any(String::is_empty) || !all_differ(&media) {
        return Err("impossible media".into());
    }
    let lowest = u16::from(magic == DUMP);
    let count = reader.u32()?;
    let mut parts = Vec::new();
    for _ in 0..count {
        parts.push(read_part(&mut reader, lowest..1 << media.len())?);
    }
    let identity = |part: &Part| (part.tenant.clone(), part.scheme, part.prefix.clone());
    let identities: Vec<_> = parts.iter().map(identity).collect();
    if !all_differ(&identities) {
        return Err("an identity stands twice".into());
    }
    if reader.at != data.len() {
        return Err("bytes after the end".into());
    }
    Ok(File { media, parts })
}

fn all_differ<T: Eq + std::hash::Hash>(items: &[T]) -> bool {
    let mut seen = HashSet::new();
    items.iter().all(|item| seen.insert(item))
}

fn read_part(reader: &mut Bytes<'_>, media: Range<u16>) -> Result<Part, String> {
    let (tenant, scheme, prefix) = (reader.text(usize::MAX)?, reader.text(usize::MAX)?, reader.text(usize::MAX)?);
    let Some(scheme) = Scheme::named(&scheme).filter(|_| !tenant.is_empty()) else {
        return Err("an identity without a tenant or of an unknown scheme".into());
    };
    let count = reader.u32()?;
    let mut components = Vec::new();
    for _ in 0..count {
        components.push(reader.text(MAX_COMPONENT_BYTES)?);
    }
    if components.iter().any(String::is_empty) || !all_differ(&components) {
        return Err("components without a name or named twice".into());
    }
    let count = reader.u32()?;
    let mut patterns = Vec::new();
    for _ in 0..count {
        let objects = usize::from(reader.u16()?);
        let (objects, _) = reader.take(objects * 3)?.as_chunks::<3>();
        let pattern: Vec<_> = objects
            .iter()
            .map(|[low, high, media]| Object { component: u16::from_le_bytes([*low, *high]), media: *media })
            .collect();
        let numbers: Vec<_> = pattern.iter().map(|object| object.component).collect();
        let are_known = numbers.iter().all(|number| usize::from(*number) < components.len());
        if pattern.is_empty() || !are_known || !all_differ(&numbers) {
            return Err("a pattern without objects, or of impossible ones".into());
        }
        if !pattern.iter().all(|object| media.contains(&object.media.into())) {
            return Err("impossible media in a pattern".into());
        }
        patterns.push(pattern);
    }
    let count = reader.u32()?;
    let start = reader.at;
    reader.take(count.checked_mul(ENTRY_BYTES).ok_or("cut off")?)?;
    let pages = start..reader.at;
    Ok(Part { tenant, scheme, prefix, components, patterns, pages })
}

impl Part {
    /// Check the pages: each once, and of a pattern that is there.
    pub fn check_pages(&self, data: &[u8]) -> Result<(), String> {
        let (entries, _) = data[self.pages.clone()].as_chunks::<ENTRY_BYTES>();
        let mut seen = HashSet::with_capacity(entries.len());
        let is_right = entries.iter().all(|entry| {
            let (page, pattern) = entry_of(entry);
            pattern < self.patterns.len() && seen.insert(page)
        });
        if is_right { Ok(()) } else { Err(BAD_PAGES.into()) }
    }
}

struct Bytes<'a> {
    data: &'a [u8],
    at: usize,
}

impl<'a> Bytes<'a> {
    fn take(&mut self, size: usize) -> Result<&'a [u8], String> {
        let taken = self.data[self.at..].get(..size).ok_or("cut off")?;
        self.at += size;
        Ok(taken)
    }

    fn fixed<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut fixed = [0; N];
        fixed.copy_from_slice(self.take(N)?);
        Ok(fixed)
    }

    fn u8(&mut self) -> Result<u8, String> {
        self.fixed().map(u8::from_le_bytes)
    }

    fn u16(&mut self) -> Result<u16, String> {
        self.fixed().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<usize, String> {
        self.fixed().map(|bytes| u32::from_le_bytes(bytes) as usize)
    }

    fn text(&mut self, most: usize) -> Result<String, String> {
        let size = self.u32()?;
        if size > most {
            return Err(format!("a text of {size} bytes, more than {most}"));
        }
        let text = std::str::from_utf8(self.take(size)?).map_err(|_| "a text that is not UTF-8")?;
        Ok(text.to_owned())
    }
}

fn write_number(out: &mut Vec<u8>, number: usize) {
    out.extend((number as u32).to_le_bytes());
}

fn write_text(out: &mut Vec<u8>, text: &str) {
    write_number(out, text.len());
    out.extend(text.as_bytes());
}

/// One identity's part that is being written.
pub struct Section {
    head: Vec<u8>,
    names: Vec<u8>,
    numbers: HashMap<Box<str>, u16>,
    patterns: Vec<u8>,
    pattern_count: usize,
    pages: Vec<u8>,
}

impl Section {
    /// With room for so many pages.
    pub fn new(identity: &Identity, pages: usize) -> Self {
        let mut head = Vec::new();
        write_text(&mut head, &identity.tenant);
        write_text(&mut head, identity.scheme.name());
        write_text(&mut head, &identity.prefix);
        Self {
            head,
            names: Vec::new(),
            numbers: HashMap::new(),
            patterns: Vec::new(),
            pattern_count: 0,
            pages: Vec::with_capacity(pages * ENTRY_BYTES),
        }
    }

    pub fn size(&self) -> usize {
        self.head.len() + self.names.len() + self.patterns.len() + self.pages.len() + 12
    }

    /// The number of a new pattern of components and media.
    pub fn pattern(&mut self, objects: &[(&str, u8)]) -> u32 {
        self.patterns.extend((objects.len() as u16).to_le_bytes());
        for (name, media) in objects {
            let number = self.numbers.get(*name).copied().unwrap_or_else(|| {
                let number = self.numbers.len() as u16;
                self.numbers.insert((*name).into(), number);
                write_text(&mut self.names, name);
                number
            });
            self.patterns.extend(number.to_le_bytes());
            self.patterns.push(*media);
        }
        self.pattern_count += 1;
        self.pattern_count as u32 - 1
    }

    pub fn page(&mut self, page: &Page, pattern: u32) {
        self.pages.extend(page);
        self.pages.extend(pattern.to_le_bytes());
    }

    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }
}

/// The whole. Sections without pages are left out.
pub fn write(magic: [u8; 4], media: &[Box<str>], sections: &[Section]) -> Vec<u8> {
    let size: usize = sections.iter().map(Section::size).sum();
    let mut out = Vec::with_capacity(size + 1024);
    out.extend(magic);
    out.extend([VERSION, media.len() as u8]);
    for name in media {
        write_text(&mut out, name);
    }
    write_number(&mut out, sections.iter().filter(|section| !section.is_empty()).count());
    for section in sections.iter().filter(|section| !section.is_empty()) {
        out.extend(&section.head);
        write_number(&mut out, section.numbers.len());
        out.extend(&section.names);
        write_number(&mut out, section.pattern_count);
        out.extend(&section.patterns);
        write_number(&mut out, section.pages.len() / ENTRY_BYTES);
        out.extend(&section.pages);
    }
    out
}
