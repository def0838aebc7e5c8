//! The exact prefix index: which rank of which worker holds how much of a chain, and in which tier.
//!
//! What it does is written in `kvcore/index.py` and `kvcore/residency.py`; how it is kept, here.

mod blocks;
mod copies;
pub mod dump;
mod links;
mod masks;
mod matching;
mod ranks;
mod residency;
mod result;
mod table;
mod waiting;

pub use blocks::{Blocks, copies_in};
pub use matching::Match;
pub use ranks::{Index, Limits, Rank, RankKey, Stats};
pub use residency::{Bounds, Given, Residency, unmark};
pub use result::Applied;
pub use table::{Keys, prefetch};
