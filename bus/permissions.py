"""Who may do what on the bus: a user for each process, with permissions that follow from `schemas.catalog.CHANNELS`.

Publishing is allowed where the catalogue names the process as a publisher, and nowhere else. Reading is free but for
two things. Questions: NATS lets who receives a question answer it (``allow_responses``), so that only its answerer may.
KV events: they spell prompts and answers, token by token, so that only who keeps an index may. Inboxes are
private (`bus.nats.access.inbox_prefix_of`). What a process does with streams and buckets is `_STORED`.
Why so, and what it does not stop: docs/adr/0024-accounts-on-the-bus.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bus import subjects
from bus.nats.access import DEFAULT_INBOX
from bus.services import PREFIX as SERVICES
from bus.subjects import ROOT, encode_id
from schemas.catalog import CHANNELS, Channel

ACCOUNT = "TIDEGATE"
SERVICES_OF_THE_HOUSE = ("ingress", "bridge", "indexer", "admission", "hints", "recorder")
PEOPLE = ("watcher", "operator")
"""``watcher``: reads (tail, top, doctor). ``operator``: also calibrates, asks policies, and manages streams."""

ANSWERED_BY: Mapping[str, str] = {
    "kv_snapshot": "bridge",
    "pool_snapshot": "bridge",
    "index_match": "indexer",
    "index_recognise": "indexer",
    "index_session": "indexer",
    "admit": "admission",
    "policy_route": "policy",
    "policy_admit": "policy",
    "policy_lease": "policy",
    "policy_hint": "policy",
}
"""Question to who answers it; the catalogue names who asks."""

ROWS: Mapping[str, tuple[str, ...]] = {
    "ingress": ("request_end",),
    "admission": ("request_end", "decision"),
    "recorder": ("tool", "worker_load"),
}
"""Which rows each publisher of the channel ``trace`` writes."""

KV_EVENTS = f"{ROOT}.kv.>"
_READ_KV_EVENTS = ("indexer", "admission")
_ASKED_BY_PEOPLE = ("index_match", "index_session")
_RESPONSES = '{ max: 1, expires: "2m" }'
_BUCKETS = (
    subjects.BUCKET_LEADERS,
    subjects.BUCKET_WORKERS,
    subjects.BUCKET_STATISTICS,
    subjects.BUCKET_CALIBRATIONS,
    subjects.BUCKET_LEARNED,
)


@dataclass(frozen=True, slots=True)
class User:
    """One user of the bus. Subjects are NATS patterns, sorted. ``answers``: it may answer what it was asked."""

    name: str
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    publish_never: tuple[str, ...] = ()
    subscribe_never: tuple[str, ...] = ()
    answers: bool = False

    @property
    def variable(self) -> str:
        """What its password is called in the server's configuration, or in the server's environment."""
        return "password_" + re.sub(r"[^A-Za-z0-9]", "_", self.name)


@dataclass(slots=True)
class _Rights:
    """Under construction. ``answers``: names of the questions that it answers."""

    name: str
    publish: set[str] = field(default_factory=set)
    subscribe: set[str] = field(default_factory=set)
    reads: set[str] = field(default_factory=lambda: _families())
    answers: frozenset[str] = frozenset()
    serves: bool = True

    def done(self) -> User:
        inbox = f"{DEFAULT_INBOX}.{encode_id(self.name)}.>"
        publish = self.publish | {inbox}
        subscribe = self.subscribe | self.reads | {inbox}
        if self.serves:
            subscribe.add(f"{SERVICES}.>")
        others = {
            channel.pattern for channel in CHANNELS if channel.kind == "question" and channel.name not in self.answers
        }
        return User(
            self.name,
            tuple(sorted(publish)),
            tuple(sorted(subscribe)),
            tuple(sorted(_hidden(publish))),
            tuple(sorted(pattern for pattern in others if not pattern.startswith(f"{ROOT}.policy.")))
            if self.serves
            else (),
            self.serves,
        )


def users(
    policies: Iterable[str] = (), workers: Iterable[str] = (), kv_policies: Iterable[str] = ()
) -> tuple[User, ...]:
    """The services, the people, one ``policy-<name>`` for each of ``policies`` and of ``kv_policies``, which may read
    KV events too, and one ``bridge-<worker>``, which may speak for that worker only, for each of ``workers``. Raises
    `ValueError` for names that cannot be told apart."""
    reading = tuple(dict.fromkeys(kv_policies))
    made = [_service(name) for name in SERVICES_OF_THE_HOUSE]
    made += [_service("bridge", worker) for worker in workers]
    made += [_policy(name) for name in policies if name not in reading]
    made += [_policy(name, kv_events=True) for name in reading]
    made += [_person(name) for name in PEOPLE]
    variables = [user.variable for user in made]
    for name in variables:
        if variables.count(name) > 1:
            raise ValueError(f"two users would have the password {name}; rename a policy or a worker")
    return tuple(made)


def publishers(channel: Channel) -> frozenset[str]:
    """Whom the catalogue lets publish: names of services, or ``policy``; everybody for ``anyone``.

    Raises `ValueError` where it names nobody."""
    if channel.publisher == "anyone":
        return frozenset((*SERVICES_OF_THE_HOUSE, "policy", *PEOPLE))
    named = frozenset(re.findall(r"\w+", channel.publisher)) & {*SERVICES_OF_THE_HOUSE, "policy"}
    if not named:
        raise ValueError(f"nobody publishes {channel.name}: {channel.publisher!r}")
    return named


def _service(service: str, worker: str | None = None) -> User:
    rights = _Rights(service if worker is None else f"{service}-{worker}")
    rights.answers = frozenset(name for name, who in ANSWERED_BY.items() if who == service)
    for channel in CHANNELS:
        if service in publishers(channel):
            rights.publish |= _addresses(channel, service, worker)
        if channel.name in rights.answers and channel.several:
            # More answers than one, over minutes: more than a server should remember for each question.
            rights.publish |= {f"{DEFAULT_INBOX}.{asker}.>" for asker in publishers(channel)}
    rights.publish |= _STORED[service]
    if service in _READ_KV_EVENTS:
        rights.reads.add(KV_EVENTS)
    if worker is not None:
        # A question that it received it could answer: it sees none to others.
        rights.reads -= {f"{ROOT}.pool.>"}
        rights.subscribe.add(subjects.kv_snapshot(worker))
    elif "kv_snapshot" in rights.answers:
        rights.subscribe.add(f"{ROOT}.kv.snapshot.*")
    return rights.done()


def _policy(name: str, *, kv_events: bool = False) -> User:
    rights = _Rights(f"policy-{name}")
    if kv_events:
        rights.reads.add(KV_EVENTS)
    rights.answers = frozenset(question for question, who in ANSWERED_BY.items() if who == "policy")
    own = encode_id(name)
    for channel in CHANNELS:
        if "policy" in publishers(channel):
            rights.publish.add(
                channel.pattern.removesuffix("*") + own if "{name}" in channel.address else channel.pattern
            )
        if channel.name in rights.answers:
            rights.subscribe.add(channel.pattern.removesuffix("*") + own)
    return rights.done()


def _person(name: str) -> User:
    rights = _Rights(name, serves=False)
    rights.subscribe.add(f"{ROOT}.>")
    rights.publish |= {channel.pattern for channel in CHANNELS if channel.name in _ASKED_BY_PEOPLE}
    rights.publish |= {f"{SERVICES}.{verb}{below}" for verb in ("PING", "INFO", "STATS") for below in ("", ".>")}
    rights.publish |= _read_stream(subjects.TRACE_STREAM)
    for bucket in _BUCKETS:
        rights.publish |= _read_bucket(bucket)
    if name == "operator":
        rights.publish |= {f"{ROOT}.policy.>", f"$KV.{subjects.BUCKET_CALIBRATIONS}.>", "$JS.API.>"}
    return rights.done()


def _addresses(channel: Channel, service: str, worker: str | None) -> set[str]:
    if channel.name == "trace":
        return {f"{ROOT}.trace.{event}.*.*" for event in ROWS[service]}
    if worker is not None and "{worker}" in channel.address:
        return {re.sub(r"\{\w+\}", "*", channel.address.replace("{worker}", encode_id(worker)))}
    return {channel.pattern}


def _hidden(publish: Iterable[str]) -> set[str]:
    """Channels that a broader pattern would allow by accident: ``kv.*.*`` is no permission for ``kv.snapshot.*``."""
    allowed = set(publish)
    return {
        channel.pattern
        for channel in CHANNELS
        if channel.pattern not in allowed and any(_covers(pattern, channel.pattern) for pattern in allowed)
    }


def _covers(broad: str, narrow: str) -> bool:
    """Whether every subject of ``narrow`` is one of ``broad``."""
    ours, theirs = broad.split("."), narrow.split(".")
    for place, wanted in enumerate(ours):
        if wanted == ">":
            return len(theirs) > place
        if place >= len(theirs) or wanted not in ("*", theirs[place]) or theirs[place] == ">":
            return False
    return len(ours) == len(theirs)


def _families() -> set[str]:
    """All of ``tg.v1`` but the questions to policies and the KV events."""
    families = {channel.address.split(".")[2] for channel in CHANNELS}
    return {f"{ROOT}.{family}.>" for family in families - {"policy", "kv"}}


# Streams, buckets, objects


def _open(stream: str) -> set[str]:
    return {f"$JS.API.STREAM.INFO.{stream}", f"$JS.API.STREAM.CREATE.{stream}"}


def _read_stream(stream: str) -> set[str]:
    return _open(stream) | {
        f"$JS.API.CONSUMER.CREATE.{stream}.>",
        f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.*",
        f"$JS.API.CONSUMER.INFO.{stream}.*",
        f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*",
    }


def _read_bucket(bucket: str) -> set[str]:
    return _read_stream(f"KV_{bucket}") | {f"$JS.API.DIRECT.GET.KV_{bucket}.>"}


def _write_bucket(bucket: str, keys: str = ">") -> set[str]:
    return _read_bucket(bucket) | {f"$KV.{bucket}.{keys}"}


def _read_objects(bucket: str) -> set[str]:
    stream = f"OBJ_{bucket}"
    return _read_stream(stream) | {f"$JS.API.STREAM.MSG.GET.{stream}", f"$JS.API.DIRECT.GET.{stream}.>"}


def _write_objects(bucket: str) -> set[str]:
    written = {f"$O.{bucket}.C.*", f"$O.{bucket}.M.*", f"$JS.API.STREAM.PURGE.OBJ_{bucket}"}
    return _read_objects(bucket) | written


_STORED: Mapping[str, set[str]] = {
    "ingress": _open(subjects.TRACE_STREAM),
    "bridge": _write_bucket(subjects.BUCKET_WORKERS) | _write_objects(subjects.OBJECTS_SNAPSHOTS),
    "indexer": _read_objects(subjects.OBJECTS_SNAPSHOTS),
    "admission": _open(subjects.TRACE_STREAM)
    | _write_bucket(subjects.BUCKET_LEADERS, "admission")
    | _write_bucket(subjects.BUCKET_LEARNED)
    | _read_bucket(subjects.BUCKET_CALIBRATIONS)
    | _read_objects(subjects.OBJECTS_SNAPSHOTS),
    "hints": _write_bucket(subjects.BUCKET_LEADERS, "hints"),
    "recorder": _read_stream(subjects.TRACE_STREAM) | {f"$JS.ACK.{subjects.TRACE_STREAM}.>"},
}
"""What each service does with JetStream. A consumer may be told to deliver its stream's messages anywhere, so that a
stream is opened to as few as can be; policies get none."""


# nats-server's configuration


def accounts_text(made: Sequence[User], include: str | None = None) -> str:
    """The block ``accounts`` of nats-server's configuration. ``include``: a file with the passwords, beside it; without
    one they are looked for in the server's environment."""
    lines = [] if include is None else [f"include {json.dumps(include)}", ""]
    lines += ["accounts {", f"  {ACCOUNT} {{", "    jetstream: enabled", "    users: ["]
    for user in made:
        lines += [
            "      {",
            f"        user: {json.dumps(user.name)}",
            f"        password: ${user.variable}",
            "        permissions {",
            *_rule("publish", user.publish, user.publish_never),
            *_rule("subscribe", user.subscribe, user.subscribe_never),
            *([f"          allow_responses: {_RESPONSES}"] if user.answers else []),
            "        }",
            "      }",
        ]
    return "\n".join([*lines, "    ]", "  }", "}", ""])


def passwords_text(passwords: Mapping[str, str], made: Sequence[User]) -> str:
    """The file that `accounts_text` includes. ``passwords``: by user."""
    return "".join(f"{user.variable}: {json.dumps(passwords[user.name])}\n" for user in made)


def _rule(what: str, allow: Sequence[str], deny: Sequence[str]) -> list[str]:
    lines = [f"          {what} {{", "            allow: ["]
    lines += [f"              {json.dumps(subject)}" for subject in allow]
    lines.append("            ]")
    if deny:
        lines += ["            deny: [", *(f"              {json.dumps(subject)}" for subject in deny), "            ]"]
    return [*lines, "          }"]
