"""Strangers' words and figures in cells of a terminal: cut where there is no room, and bounded in memory. Pure."""

from __future__ import annotations

from hashlib import blake2b

from rich.cells import cell_len, get_character_cell_size

from tidegate.safe_text import safe

MAX_KEPT = 256
"""Characters of a stranger's text that are kept."""


def bounded(text: str) -> str:
    """``text``, or of a long one its beginning and a digest: equal texts stay equal, others different."""
    if len(text) <= MAX_KEPT:
        return text
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{text[: MAX_KEPT - 24]}…{digest}"


def fit(text: str, width: int, *, right: bool = False) -> str:
    """`safe` text in exactly ``width`` cells: padded (on the left where ``right``), or cut with ``…``.

    A wide character that would be cut in half is left out.
    """
    shown = cut(text, width)
    room = " " * (width - cell_len(shown))
    return room + shown if right else shown + room


def cut(text: str, width: int) -> str:
    """`safe` text in at most ``width`` cells."""
    if width <= 0:
        return ""
    shown = safe(text[: 4 * width])
    if len(text) <= 4 * width and cell_len(shown) <= width:
        return shown
    kept, cells = [], 0
    for character in shown:
        size = get_character_cell_size(character)
        if cells + size > width - 1:
            break
        kept.append(character)
        cells += size
    return "".join(kept) + "…"


def duration(ms: float | None) -> str:
    """At most four cells: ``0.4s``, ``12s``, ``5m``, ``3h``, ``12d``; empty for ``None``."""
    if ms is None:
        return ""
    seconds = max(0.0, ms / 1000)
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    for limit, unit, size in ((100, "s", 1), (100 * 60, "m", 60), (48 * 3600, "h", 3600)):
        if seconds < limit:
            return f"{int(seconds / size)}{unit}"
    return f"{min(999, int(seconds / 86400))}d"


def amount(count: float | None) -> str:
    """At most five cells: ``950``, ``12.3k``, ``123k``, ``1.2M``; empty for ``None``."""
    if count is None:
        return ""
    for limit, unit, size in ((1e3, "", 1.0), (1e6, "k", 1e3), (1e9, "M", 1e6), (1e12, "G", 1e9)):
        if count < limit * 0.9995 or (unit == "" and count < limit):
            value = count / size
            return f"{count:.0f}" if not unit else f"{value:.1f}{unit}" if value < 99.95 else f"{value:.0f}{unit}"
    return "999G+"


def percent(ratio: float | None) -> str:
    """``87%``; empty for ``None``."""
    return "" if ratio is None else f"{100 * ratio:.0f}%"
