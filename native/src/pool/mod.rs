//! What lies in a shared pool (Mooncake), and the hashes of its pages.
//!
//! What it does is written in `kvcore/pool_index.py` and the modules beside it; how it is kept, here.

pub mod copies;
pub mod events;
pub mod format;
pub mod index;
pub mod keys;
pub mod matching;
pub mod page_hash;
mod pages;
mod space;
mod states;

pub use space::Space;
