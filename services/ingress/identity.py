"""Whose request is this, and what is it to its session? Read from headers, weakly from the body; never a 4xx.

The first family whose session header is present wins outright; families are never mixed (spec: identity-and-traces
§1.2, oracles H1-H23 of §8.1; harness.md §1 and §6 for what the harnesses really send). Header names are
case-insensitive; values are trimmed; a value that is blank or not printable ASCII counts as absent; only the first
value of a name is read. The families are the rows of `FAMILIES`, the kinds of request the rows of `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from schemas.base import UNDECODABLE
from schemas.session import Family, InputTrigger, RequestKind, SessionIdentity, SessionKey
from schemas.trace import Compaction, TurnFacts

MAX_PARENT_BYTES = 256
"""A longer parent id is dropped; session ids may have any length (spec: identity-and-traces §1.2 rule 9)."""

Signals = dict[str, str]
"""Headers by lower-case name, only those that are present by the rules above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyFacts:
    """What a body says about its sender and its purpose; never its content.

    ``one_shot``: no assistant or tool message yet. ``title_asked``: the text by which OpenCode asks for a title.
    ``output_format``: the type of the structured output that is asked for. ``fields``: weak identity by name, as
    `BODY_FIELDS` names them.
    """

    has_tools: bool = False
    one_shot: bool = False
    title_asked: bool = False
    output_format: str | None = None
    input_trigger: InputTrigger = "other"
    fields: Signals = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Resolved:
    """One request's identity, its kind, and what made its sender send it. ``turn``, ``compaction``: what its harness
    says of the turn, and of a compaction, for the row."""

    identity: SessionIdentity
    kind: RequestKind
    input_trigger: InputTrigger
    turn: TurnFacts | None = None
    compaction: Compaction | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRule:
    """How one family spells identity.

    ``root``: names of the session header, the first present one counts. ``agent``: the header of a sub-agent's own
    id. ``agent_alone``: that header is identity even without the session header. ``needs_prefix``: without the agent's
    header, some header must start so. ``parent``: names the direct parent, an agent's id where the family has agents.
    ``parent_of_child``: the parent header counts for sub-agents only, and without it the session is the parent.
    """

    family: Family
    root: tuple[str, ...]
    agent: str | None = None
    agent_alone: bool = False
    needs_prefix: str | None = None
    parent: str | None = None
    parent_of_child: bool = False
    weak: bool = False


FAMILIES = (
    FamilyRule(family="tidegate", root=("x-tidegate-session-id",), parent="x-tidegate-parent-session-id"),
    FamilyRule(family="dynamo", root=("x-dynamo-session-id",), parent="x-dynamo-parent-session-id"),
    FamilyRule(
        family="claude_code",
        root=("x-claude-code-session-id",),
        agent="x-claude-code-agent-id",
        parent="x-claude-code-parent-agent-id",
        parent_of_child=True,
    ),
    FamilyRule(
        family="codex",
        root=("session-id",),
        agent="thread-id",
        agent_alone=True,
        needs_prefix="x-codex-",
        parent="x-codex-parent-thread-id",
    ),
    FamilyRule(
        family="deepseek", root=("x-deepseek-harness-session-id",), parent="x-deepseek-harness-parent-session-id"
    ),
    FamilyRule(family="opencode", root=("x-session-id",), parent="x-parent-session-id"),
    FamilyRule(family="pi", root=("session-id", "session_id")),
    FamilyRule(family="affinity", root=("x-session-affinity",)),
)

BODY_FAMILIES = (
    FamilyRule(family="body", root=("codex_session",), agent="codex_thread", agent_alone=True, weak=True),
    FamilyRule(family="body", root=("user_session",), weak=True),
    FamilyRule(family="body", root=("prompt_cache_key",), weak=True),
)
"""Weak identity, over `BodyFacts.fields`: a body field may be shared by a whole tree of agents."""

BODY_FIELDS = ("codex_session", "codex_thread", "codex_turn_metadata", "user_session", "prompt_cache_key")
"""``client_metadata``'s session, thread and turn metadata; the session inside ``metadata.user_id``; and the key."""

_IDENTITY_HEADERS = frozenset(name for rule in FAMILIES for name in (*rule.root, rule.agent, rule.parent) if name)

FINAL_HEADERS = ("x-tidegate-session-final", "x-dynamo-session-final")
BACKGROUND_HEADER = "x-tidegate-background"
"""Says, of whatever session, that nobody waits for its answers."""
_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


COMPACT_HEADER = "x-deepseek-harness-compact"
"""DeepSeek's harness: exactly ``1`` on a request that makes its history shorter (spec: identity-and-traces §1.4)."""
MAX_WORD = 256
"""Characters of a harness's word in a row; a longer one is cut."""
MAX_ORDINAL = 1 << 31


class TurnMetadata(msgspec.Struct):
    """The part of Codex's ``x-codex-turn-metadata`` that identity and rows need (spec: harness.md §3). What only rows
    need has any type: a harness that changes it loses that alone."""

    session_id: str = ""
    thread_id: str = ""
    turn_id: str = ""
    request_kind: str = ""
    agent_name: Any = None
    root_turn_id: Any = None
    parent_turn_id: Any = None
    window_number: Any = None
    forked_from_thread_id: Any = None
    forked_from_ordinal_exclusive: Any = None
    compaction: Any = None


_turn_metadata = msgspec.json.Decoder(TurnMetadata)
_NO_METADATA = TurnMetadata()
_NO_TURN = TurnFacts()


def read_headers(headers: Iterable[tuple[bytes, bytes]]) -> Signals:
    """Headers by lower-case name: the first value of each name, trimmed; blank or not printable ASCII is absent."""
    signals: Signals = {}
    for raw_name, raw_value in headers:
        name = raw_name.decode("latin-1").lower()
        if name in signals:
            continue
        value = raw_value.strip(b" \t").decode("latin-1")
        signals[name] = value if value.isascii() and value.isprintable() else ""
    return {name: value for name, value in signals.items() if value}


def unreadable_identity(headers: Iterable[tuple[bytes, bytes]], signals: Signals) -> int:
    """How many session and agent headers were sent with a value that counts as absent although it is not blank."""
    names = {raw_name.decode("latin-1").lower() for raw_name, raw_value in headers if raw_value.strip(b" \t")}
    return len((names & _IDENTITY_HEADERS) - signals.keys())


def read_turn_metadata(text: str) -> TurnMetadata:
    """Codex's turn metadata; empty for anything that is not such JSON. Its ids are read as those of headers are."""
    try:
        metadata = _turn_metadata.decode(text)
    except UNDECODABLE:
        return _NO_METADATA
    ids = {name: _id(getattr(metadata, name)) for name in ("session_id", "thread_id", "turn_id")}
    return msgspec.structs.replace(metadata, **ids)


def resolve(signals: Signals, facts: BodyFacts, endpoint: str, *, tenant: str = "default", request_id: str) -> Resolved:
    """Identity, kind and trigger of one request. ``request_id`` names the session of a request without identity."""
    metadata = read_turn_metadata(
        signals.get("x-codex-turn-metadata") or facts.fields.get("codex_turn_metadata") or "{}"
    )
    identity = (
        _first(FAMILIES, _with_codex_thread(signals, metadata), tenant)
        or _first(BODY_FAMILIES, facts.fields, tenant)
        or SessionIdentity(key=SessionKey(tenant=tenant, family="request", root=request_id), session_id=request_id)
    )
    if identity.key.family != "request" and not identity.weak:
        identity = msgspec.structs.replace(identity, final=_final(signals), turn_id=metadata.turn_id or None)
    if _BOOLEANS.get(signals.get(BACKGROUND_HEADER, "").lower()):
        identity = msgspec.structs.replace(identity, background=True)
    kind = request_kind(signals, facts, endpoint, metadata)
    if kind == "turn" and identity.final:
        kind = "final"
    return Resolved(identity, kind, facts.input_trigger, turn_facts(metadata), compaction_of(signals, kind, metadata))


def turn_facts(metadata: TurnMetadata) -> TurnFacts | None:
    """What Codex says of the turn and of where its thread comes from; ``None`` where it says nothing."""
    said = TurnFacts(
        agent_name=_word(metadata.agent_name),
        root_turn_id=_word(metadata.root_turn_id),
        parent_turn_id=_word(metadata.parent_turn_id),
        window_number=_ordinal(metadata.window_number),
        forked_from_session_id=_word(metadata.forked_from_thread_id),
        forked_from_ordinal=_ordinal(metadata.forked_from_ordinal_exclusive),
    )
    return None if said == _NO_TURN else said


def compaction_of(signals: Signals, kind: RequestKind, metadata: TurnMetadata) -> Compaction | None:
    """Why and how the history is made shorter; empty where a harness says only that it is; ``None`` where none says
    so (spec: identity-and-traces §1.4)."""
    if kind != "compaction":
        return None
    if metadata.request_kind == "compaction":
        said = metadata.compaction if isinstance(metadata.compaction, dict) else {}
        return Compaction(**{name: _word(said.get(name)) for name in Compaction.__struct_fields__})
    return Compaction() if signals.get(COMPACT_HEADER) == "1" else None


def _id(text: str) -> str:
    """Trimmed; empty where it is not printable ASCII (escapes of JSON may hide anything)."""
    trimmed = text.strip(" \t")
    return trimmed if trimmed.isascii() and trimmed.isprintable() else ""


def _word(value: Any) -> str | None:
    """A text of a harness, trimmed and cut; anything else, and a blank one, is absent."""
    return (value.strip()[:MAX_WORD] or None) if isinstance(value, str) else None


def _ordinal(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < MAX_ORDINAL else None


def _with_codex_thread(signals: Signals, metadata: TurnMetadata) -> Signals:
    """Codex repeats the thread in its turn metadata and its window id: used where the plain header is missing."""
    if "thread-id" in signals:
        return signals
    thread = metadata.thread_id or signals.get("x-codex-window-id", "").rpartition(":")[0]
    if not thread or not any(name.startswith("x-codex-") for name in signals):
        return signals
    session = signals.get("session-id") or metadata.session_id
    return {**signals, "thread-id": thread, **({"session-id": session} if session else {})}


def _first(rules: tuple[FamilyRule, ...], signals: Signals, tenant: str) -> SessionIdentity | None:
    for rule in rules:
        identity = _match(rule, signals, tenant)
        if identity is not None:
            return identity
    return None


def _match(rule: FamilyRule, signals: Signals, tenant: str) -> SessionIdentity | None:
    session = next((signals[name] for name in rule.root if name in signals), None)
    agent = signals.get(rule.agent) if rule.agent else None
    if session is None and not (agent and rule.agent_alone):
        return None
    if agent is None and rule.needs_prefix and not any(name.startswith(rule.needs_prefix) for name in signals):
        return None
    own = agent or session
    root = session or agent
    assert own is not None
    assert root is not None
    is_child = own != root
    parent_id = _parent_id(rule, signals, own, root, is_child)
    return SessionIdentity(
        key=SessionKey(tenant=tenant, family=rule.family, root=root, agent=own if is_child else ""),
        session_id=own,
        parent_session_id=parent_id,
        parent=_parent_key(rule, tenant, parent_id, session),
        weak=rule.weak,
    )


def _parent_id(rule: FamilyRule, signals: Signals, own: str, root: str, is_child: bool) -> str | None:
    parent = signals.get(rule.parent) if rule.parent else None
    if parent is not None and (parent == own or len(parent) > MAX_PARENT_BYTES):
        parent = None
    if rule.parent_of_child:
        return (parent or root) if is_child else None
    return parent


def _parent_key(rule: FamilyRule, tenant: str, parent_id: str | None, session: str | None) -> SessionKey | None:
    """An agent of the same session where the family has agents, else a session of its own."""
    if parent_id is None:
        return None
    if rule.agent is None or session is None:
        return SessionKey(tenant=tenant, family=rule.family, root=parent_id)
    return SessionKey(tenant=tenant, family=rule.family, root=session, agent="" if parent_id == session else parent_id)


def _final(signals: Signals) -> bool | None:
    """The first end-of-session header that can be read as a boolean."""
    for name in FINAL_HEADERS:
        value = _BOOLEANS.get(signals.get(name, "").lower())
        if value is not None:
            return value
    return None


@dataclass(frozen=True, slots=True)
class Question:
    """What the tells of `KINDS` look at."""

    signals: Signals
    facts: BodyFacts
    endpoint: str
    metadata: TurnMetadata

    @property
    def tool_less_start(self) -> bool:
        """No tools, and nothing answered yet: how side requests of agents look."""
        return self.facts.one_shot and not self.facts.has_tools


PASSED_APIS = frozenset({"embeddings", "tokenize", "detokenize", "passthrough"})
"""`services.ingress.passing` reads them."""

KINDS: tuple[tuple[RequestKind, str, Callable[[Question], bool]], ...] = (
    ("count_tokens", "the API counts only", lambda q: q.endpoint == "count_tokens"),
    ("passthrough", "the API is passed on as it comes", lambda q: q.endpoint in PASSED_APIS),
    (
        "compaction",
        "Codex says so",
        lambda q: (
            q.metadata.request_kind == "compaction" and ("thread-id" in q.signals or "codex_thread" in q.facts.fields)
        ),
    ),
    ("compaction", "DeepSeek's harness says so", lambda q: q.signals.get(COMPACT_HEADER) == "1"),
    (
        "compaction",
        "Claude Code's /compact: its only tell is this beta",
        lambda q: "x-claude-code-session-id" in q.signals and "fallback-credit-" in q.signals.get("anthropic-beta", ""),
    ),
    (
        "title",
        "Claude Code: no tools, structured output",
        lambda q: (
            "x-claude-code-session-id" in q.signals and q.tool_less_start and q.facts.output_format == "json_schema"
        ),
    ),
    (
        "title",
        "OpenCode: no tools, asks for a title",
        lambda q: "x-session-id" in q.signals and q.tool_less_start and q.facts.title_asked,
    ),
    (
        "compaction",
        "OpenCode: no tools, the transcript as one text",
        lambda q: (
            "x-session-id" in q.signals
            and q.tool_less_start
            and q.signals.get("user-agent", "").startswith("opencode/")
        ),
    ),
)
"""Kind, why, and the tell; the first that holds decides, else it is a turn. A tool-less request of an unknown client
is a turn: only a harness that is known to send side requests may have one of its requests taken for a side request."""


def request_kind(signals: Signals, facts: BodyFacts, endpoint: str, metadata: TurnMetadata) -> RequestKind:
    """What this request is to its session."""
    question = Question(signals, facts, endpoint, metadata)
    return next((kind for kind, _, holds in KINDS if holds(question)), "turn")
