"""The recorded headers, the table of families and docs/harnesses.md say the same.

A harness that is recorded anew with another header, a family that is changed, or a row of the page that is not, fails
here. Each of the three is read by itself: headers as they were on the wire, `FAMILIES`, and the page's tables.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

from services.ingress.identity import COMPACT_HEADER, FAMILIES, KINDS
from tests.support.harness import WHO, recorded, whole

PAGE = (Path(__file__).parents[3] / "docs" / "harnesses.md").read_text(encoding="utf-8")

LOOKS_LIKE_IDENTITY = re.compile(r"session|thread|agent-id|subagent|conversation|affinity|turn|window|request-id")
"""Names that could say whose a request is: a new one of these has to be looked at."""


def table(heading: str) -> list[dict[str, str]]:
    """The first table after the line that begins with ``heading``, row by row, by column."""
    lines = PAGE[PAGE.index(heading) :].splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[begin:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    names, _, *cells = rows
    assert all(len(each) == len(names) for each in cells)
    return [dict(zip(names, each, strict=True)) for each in cells]


def named(cell: str) -> frozenset[str]:
    """The header names in a cell."""
    return frozenset(re.findall(r"`([^`]+)`", cell))


class Roles(NamedTuple):
    """Headers by what they say."""

    session: frozenset[str]
    agent: frozenset[str]
    parent: frozenset[str]

    def among(self, names: set[str]) -> Roles:
        return Roles(*(role & names for role in self))


SENT = table("## What they send")
OTHERS = frozenset().union(*(named(row["header"]) for row in table("Headers that look like one")))
CODE = {
    rule.family: Roles(
        frozenset(rule.root), frozenset(filter(None, [rule.agent])), frozenset(filter(None, [rule.parent]))
    )
    for rule in FAMILIES
}
DOCUMENTED = {
    row["family"].strip("`"): Roles(named(row["session"]), named(row["sub-agent"]), named(row["parent"]))
    for row in SENT
}
VERSIONS = {row["known from"]: row for row in SENT if row["known from"] in WHO}


def headers_by_harness() -> dict[str, set[str]]:
    """All header names of each recorded harness, as they were on the wire, in lower case."""
    rows = [row for rows in recorded().values() for row in rows]
    names: dict[str, set[str]] = defaultdict(set)
    for row, request in zip(rows, whole(), strict=True):
        names[row["harness"]] |= {name.lower() for name, _ in request.headers}
    return names


RECORDED = headers_by_harness()


def test_the_page_has_every_family_with_its_headers() -> None:
    """In the order in which they are tried, with the names that the code reads, by what they say."""
    assert [row["family"].strip("`") for row in SENT if row["family"].strip("`") in CODE] == list(CODE)
    assert {family: DOCUMENTED[family] for family in CODE} == CODE
    assert DOCUMENTED.keys() - CODE.keys() == {"body", "request"}
    assert DOCUMENTED["body"] == DOCUMENTED["request"] == Roles(frozenset(), frozenset(), frozenset())


def test_the_page_has_sessions_headers_in_the_order_in_which_they_are_read() -> None:
    """Of several the first that is there counts."""
    told = {row["family"].strip("`"): re.findall(r"`([^`]+)`", row["session"]) for row in SENT}
    assert {rule.family: told[rule.family] for rule in FAMILIES} == {rule.family: list(rule.root) for rule in FAMILIES}


def test_the_page_has_every_recorded_version() -> None:
    assert set(VERSIONS) == set(RECORDED) == set(WHO)


@pytest.mark.parametrize("harness", sorted(RECORDED))
def test_each_harness_sends_what_the_page_says(harness: str) -> None:
    """Its own family's headers, all of them and in their roles; of families that are tried before its own, none that
    would be enough."""
    family = VERSIONS[harness]["family"].strip("`")
    sent = RECORDED[harness]
    if family not in CODE:
        assert not sent & frozenset().union(*(roles.session for roles in CODE.values()))
        return
    assert CODE[family].among(sent) == CODE[family]
    for other in FAMILIES[: list(CODE).index(family)]:
        enough = set(other.root) & sent
        excused = other.needs_prefix and not any(name.startswith(other.needs_prefix) for name in sent)
        assert not enough or excused, other.family


@pytest.mark.parametrize("harness", sorted(RECORDED))
def test_no_header_that_looks_like_identity_is_unknown(harness: str) -> None:
    """It is a family's, or the page says why it is no session."""
    roles = frozenset().union(*(role for family in CODE.values() for role in family))
    suspicious = {name for name in RECORDED[harness] if LOOKS_LIKE_IDENTITY.search(name)}
    assert suspicious <= roles | OTHERS


def test_headers_that_are_no_session_were_recorded() -> None:
    """The page explains nothing that nobody sends."""
    assert frozenset().union(*RECORDED.values()) >= OTHERS


def test_kinds_of_requests_are_those_of_the_page() -> None:
    """Each kind and harness with a tell in the code has one on the page, and the other way round."""
    harnesses = ("Claude Code", "Codex", "OpenCode")
    on_page = {
        (row["kind"].strip("`"), name) for row in table("### Kinds of requests") for name in harnesses if row[name]
    }
    in_code = {(kind, name) for kind, why, _ in KINDS for name in harnesses if why.startswith(name)}
    in_code |= {("count_tokens", "Claude Code")}  # told by its path
    assert on_page == in_code
    assert COMPACT_HEADER.startswith("x-deepseek-harness-")


def test_every_harness_of_the_overview_has_its_section() -> None:
    """With something to copy, and the anchor that the overview links."""
    for row in table("In short:"):
        name, anchor = re.findall(r"\[([^\]]+)\]\(#([^)]+)\)", row["harness"])[0]
        assert anchor == name.lower().replace(" ", "-")
        section = PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert "```" in section
        assert "127.0.0.1:8080" in section or "examples/harness/" in section


def test_what_is_to_be_copied_can_be_read() -> None:
    """JSON, TOML, YAML and Python of the page."""
    tomllib = pytest.importorskip("tomllib")
    yaml = pytest.importorskip("yaml")
    readers = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load}
    readers["python"] = lambda text: compile(text, "docs/harnesses.md", "exec")
    blocks = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
    assert {kind for kind, _ in blocks} == set(readers)
    for kind, text in blocks:
        assert readers[kind](text) is not None
