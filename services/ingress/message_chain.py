"""A conversation by where its prompts end: a hash of everything so far, at the end of each part of it.

For knowing whose next turn a prompt is that names nobody (docs/adr/0016). Blocks of tokens or of text would not do: of
two prompts that differ in their last words only, both have the same full blocks, and either looks as if it went on from
the other. Here a prompt that goes on from another has that one's last hash, exactly, and no other prompt has.

The lowest bit of each hash says whether the model said that part (1) or it was given it (0), so that whoever sees two
prompts knows where an answer is between them.

Parts and what is left out of them: `services.ingress.texts`. A text that is appended to the last message is a part of
its own, so that a message may grow (as with Claude Code's compaction, spec: harness.md §2).
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct

from xxhash import xxh3_64_intdigest

from kvcore import seed_of
from kvcore.hashing import SEED
from services.ingress.endpoints import ChatPrompt, ClientRequest
from services.ingress.texts import items

MESSAGE_SEED = int.from_bytes(b"tg.mesg\x01", "little")
"""Added to the seed of the parts' hashes, and seed of the chain: no message chain is ever taken for another chain."""

MAX_PARTS = 32_768
"""A conversation of more parts is not recognised: its chain would not fit into the messages that carry it well."""

PREAMBLE_ROLES = frozenset({"system", "developer"})
"""Roles that say what every session of a harness says, while they come first."""

CALL = "_call"
"""How the type of a Responses item ends that has no role and is the model's: ``function_call`` and its kin."""

_MASK64 = (1 << 64) - 1
_PAIR = Struct("<QQ")
_HASH = Struct("<Q")


@dataclass(frozen=True, slots=True)
class MessageChain:
    """``hashes``: u64 little-endian, one at the end of each part. ``preamble``: how many of them come before the first
    message that is no system message."""

    hashes: bytes
    preamble: int


def message_chain(request: ClientRequest) -> MessageChain | None:
    """The chain of a request's messages, in the namespace of its cache salt; ``None`` where it has none (a completion's
    prompt is a text without ends), or more than `MAX_PARTS` parts."""
    if not isinstance(request.prompt, ChatPrompt):
        return None
    seed = (seed_of(None, request.cache_salt) - SEED + MESSAGE_SEED) & _MASK64
    chain = bytearray()
    parent, preamble, leading = 0, 0, True
    for item in items(request.prompt):
        leading = leading and (item.is_tool or item.role in PREAMBLE_ROLES)
        is_answer = item.role == "assistant" or (not item.role and item.type.endswith(CALL))
        for part in item.parts:
            local = xxh3_64_intdigest(part, seed)
            parent = xxh3_64_intdigest(_PAIR.pack(parent, local), MESSAGE_SEED) & ~1 | is_answer
            chain += _HASH.pack(parent)
        if leading:
            preamble = len(chain) // _HASH.size
        if len(chain) > MAX_PARTS * _HASH.size:
            return None
    return MessageChain(bytes(chain), preamble) if chain else None
