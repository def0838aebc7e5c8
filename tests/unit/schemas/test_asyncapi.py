"""``asyncapi.yaml``: in step with the schemas, valid YAML, and without dangling references."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from schemas import asyncapi
from schemas.asyncapi import OUTPUT, document, main, to_yaml
from schemas.catalog import CHANNELS, PARAMETERS

PROSE = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Zl", "Zp")), max_size=10)


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "$ref":
                yield value
            else:
                yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_the_file_is_what_the_schemas_say(capsys: pytest.CaptureFixture[str]) -> None:
    """``python -m schemas.asyncapi`` was run after the last change."""
    assert main(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.long
def test_check_notices_a_change(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stale or absent file fails the check and says what to run; writing mends it."""
    monkeypatch.setattr(asyncapi, "OUTPUT", tmp_path / "asyncapi.yaml")
    assert main(["--check"]) == 1
    assert "python -m schemas.asyncapi" in capsys.readouterr().err
    assert main([]) == 0
    assert main(["--check"]) == 0
    (tmp_path / "asyncapi.yaml").write_text("stale")
    assert main(["--check"]) == 1


@pytest.mark.long
def test_yaml_reads_the_same() -> None:
    """A real YAML reader sees what we meant."""
    assert yaml.safe_load(OUTPUT.read_text()) == json.loads(json.dumps(document()))


def test_every_reference_leads_somewhere() -> None:
    """Messages, schemas, channels, replies."""
    whole = document()
    found = set(references(whole))
    assert len(found) > 60
    for reference in found:
        node: Any = whole
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]


def test_every_channel_is_complete() -> None:
    """Who publishes, what a loss means, every parameter described, questions with their replies."""
    whole = document()
    for channel in CHANNELS:
        made = whole["channels"][channel.name]
        assert made["description"]
        assert made["x-publisher"]
        assert made["x-loss"].endswith(".")
        assert set(made.get("parameters", {})) == {
            token[1:-1] for token in channel.address.split(".") if token.startswith("{")
        }
        assert set(made.get("parameters", {})) <= set(PARAMETERS)
        operation = whole["operations"][f"publish_{channel.name}"]
        assert ("reply" in operation) == (channel.kind == "question")
        assert ("bindings" in operation) == bool(channel.queue)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**40), 2**40) | PROSE,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PROSE, inner, max_size=3),
        max_leaves=8,
    )
)
def test_the_yaml_writer_round_trips(value: Any) -> None:
    """Whatever prose is in a description or a key: quotes, colons, indicators, other scripts."""
    assert yaml.safe_load(to_yaml(value)) == value
