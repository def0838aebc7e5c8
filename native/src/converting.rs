//! Batches that were not decoded here, as those of `kvcore.events`: read by their attributes.

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::TokensError;
use crate::arguments::{multimodal, text_bytes};
use crate::events::{Event, Removed, Stored};
use crate::hashing::TOKEN_BYTES;
use crate::index::Applied;
use crate::media::Place;

/// The events of a batch, and the counts that it brings.
pub fn read_batch(batch: &Bound<'_, PyAny>) -> PyResult<(Vec<Event>, Applied)> {
    let mut applied = Applied::default();
    if let Ok(rejected) = batch.getattr("rejected")?.cast::<PyDict>() {
        for (reason, count) in rejected {
            applied.others.push((reason.extract()?, count.extract()?));
        }
    }
    let mut events = Vec::new();
    for event in batch.getattr("events")?.try_iter()? {
        let event = event?;
        match event.get_type().name()?.to_str()? {
            "Stored" => events.push(Event::Stored(Arc::new(stored(&event)?))),
            "Removed" => events.push(Event::Removed(Arc::new(removed(&event)?))),
            "Cleared" => events.push(Event::Cleared),
            _ => {}
        }
    }
    Ok((events, applied))
}

fn removed(event: &Bound<'_, PyAny>) -> PyResult<Removed> {
    Ok(Removed {
        hashes: event.getattr("hashes")?.extract()?,
        place: Place { tier: tier(event)?, connector: false, known: true },
        group: event.getattr("group")?.extract()?,
    })
}

fn stored(event: &Bound<'_, PyAny>) -> PyResult<Stored> {
    let connector = event.getattr("connector")?.is_truthy()?;
    let stored = Stored {
        hashes: event.getattr("hashes")?.extract()?,
        parent: event.getattr("parent")?.extract()?,
        tokens: event.getattr("tokens")?.extract()?,
        block_size: event.getattr("block_size")?.extract()?,
        place: Place { tier: tier(event)?, connector, known: true },
        adapter: text(event, "adapter")?,
        salt: text(event, "salt")?,
        mm: multimodal(Some(&event.getattr("mm")?))?,
        group: event.getattr("group")?.extract()?,
        group_kind: text(event, "group_kind")?,
        session_id: text(event, "session_id")?,
        eagle: event.getattr("eagle")?.is_truthy()?,
        misaligned: event.getattr("misaligned")?.is_truthy()?,
    };
    if !stored.tokens.len().is_multiple_of(TOKEN_BYTES) {
        return Err(TokensError::new_err(format!("{} bytes are not whole u32 token ids", stored.tokens.len())));
    }
    if !stored.misaligned && !stored.is_whole() {
        return Err(PyValueError::new_err("the tokens do not line up with the hashes"));
    }
    Ok(stored)
}

/// Texts are UTF-8; a lone surrogate cannot be one.
fn text(event: &Bound<'_, PyAny>, name: &str) -> PyResult<Option<String>> {
    let value = event.getattr(name)?;
    if value.is_none() {
        return Ok(None);
    }
    let bytes = text_bytes(Some(value.cast::<PyString>()?))?;
    String::from_utf8(bytes).map(Some).map_err(|error| PyValueError::new_err(error.to_string()))
}

fn tier(event: &Bound<'_, PyAny>) -> PyResult<u8> {
    let tier = event.getattr("tier")?.extract()?;
    if tier > 3 { Err(PyValueError::new_err(format!("there is no tier {tier}"))) } else { Ok(tier) }
}
