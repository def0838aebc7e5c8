"""The bounds of an index: the same names and defaults as in the pure-Python twin (`kvcore.index.IndexLimits`)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IndexLimits:
    """Bounds in blocks: in all; per group of a rank, waiting for their parent; per group of a rank, remembered after
    they left."""

    max_blocks: int = 8_000_000
    max_held: int = 8_192
    max_remembered: int = 4_096
