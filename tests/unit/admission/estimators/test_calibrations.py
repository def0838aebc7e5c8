"""Stored reload curves as admission reads them (spec scheduling §1.3)."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.subjects import calibration
from schemas.base import to_json
from schemas.calibration import Calibration, CalibrationPoint
from schemas.worker import Engine
from services.admission.estimators.calibrations import MAX_BYTES, CalibrationTable, read_calibration
from services.admission.estimators.errors import BadStateError
from services.admission.estimators.reload_cost import H100_8B

POINT = CalibrationPoint(tokens=64_000, runs_s=(3.8,), seconds=3.8)


def curve(
    model: str = "m", engine: Engine = "vllm", kv_tokens: int | None = 412_000, linear: float = 2.6e-5, at_ms: int = 1
) -> Calibration:
    return Calibration(
        model=model, engine=engine, kv_tokens=kv_tokens, quadratic=5.2e-10, linear=linear, at_ms=at_ms, points=(POINT,)
    )


def key_of(stored: Calibration) -> str:
    return calibration(stored.model, stored.profile)


def table(*stored: Calibration) -> CalibrationTable:
    made = CalibrationTable()
    for each in stored:
        made.take(key_of(each), to_json(each))
    return made


def test_a_stored_curve_is_a_cost() -> None:
    """Written by the command, read by its key, found by what a bridge says of the engine."""
    found = table(curve()).find("m", "vllm", 412_000)
    assert found is not None
    assert found.cost == H100_8B
    assert found.stored == curve()


def test_a_restart_finds_its_curve_and_another_machine_does_not() -> None:
    """By the nearest KV capacity within a tenth, on whichever side of a rounded key it falls."""
    known = table(curve(kv_tokens=412_000), curve(kv_tokens=430_000, linear=3e-5), curve("n", linear=9e-5))
    linear = {
        kv_tokens: found.cost.linear if (found := known.find("m", "vllm", kv_tokens)) else None
        for kv_tokens in (350_000, 380_000, 414_999, 415_001, 428_000, 470_000, 600_000)
    }
    assert linear == {
        350_000: None,
        380_000: 2.6e-5,
        414_999: 2.6e-5,
        415_001: 2.6e-5,
        428_000: 3e-5,
        470_000: 3e-5,
        600_000: None,
    }
    assert known.find("m", "sglang", 412_000) is None
    assert known.find("other", "vllm", 412_000) is None


def test_without_a_capacity_only_a_curve_without_rivals_will_do() -> None:
    """An engine that tells nothing is not given one of two machines' costs."""
    assert table(curve()).find("m", "vllm", None) is not None
    assert table(curve(kv_tokens=None)).find("m", "vllm", 412_000) is not None
    assert table(curve(), curve(kv_tokens=96_000)).find("m", "vllm", None) is None


def test_a_newer_measurement_replaces_and_a_deletion_removes() -> None:
    """As a watch of the bucket tells them."""
    known = table(curve(), curve(linear=5e-5, at_ms=2))
    found = known.find("m", "vllm", 412_000)
    assert found is not None
    assert (len(known), found.cost.linear) == (1, 5e-5)
    known.take(key_of(curve()), None)
    known.take("never.seen", None)
    assert (len(known), known.find("m", "vllm", 412_000)) == (0, None)


@pytest.mark.parametrize(
    ("key", "payload", "reason"),
    [
        ("m.vllm-410000", b"", "undecodable"),
        ("m.vllm-410000", b"[]", "undecodable"),
        ("m.vllm-410000", b" " * (MAX_BYTES + 1), "too_large"),
        ("n.vllm-410000", to_json(curve()), "bad_value"),
        ("m.vllm-96000", to_json(curve()), "bad_value"),
        ("m.vllm-410000", to_json(curve(linear=1.0)), "bad_value"),
        ("m.vllm-410000", to_json(msgspec.structs.replace(curve(), quadratic=0.0, linear=0.0)), "bad_value"),
    ],
)
def test_what_is_no_curve_is_refused_and_costs_nothing(key: str, payload: bytes, reason: str) -> None:
    """Each with its reason: another's key, 18 hours for a prompt, no cost at all; what was known stays."""
    known = table(curve())
    with pytest.raises(BadStateError) as caught:
        known.take(key, payload)
    assert caught.value.reason == reason
    assert known.find("m", "vllm", 412_000) is not None


def test_curves_are_bounded() -> None:
    """A full table takes news of what it knows, and nothing else."""
    known = CalibrationTable(max_curves=1)
    known.take(key_of(curve()), to_json(curve()))
    known.take(key_of(curve()), to_json(curve(linear=5e-5)))
    with pytest.raises(BadStateError) as caught:
        known.take(key_of(curve("n")), to_json(curve("n")))
    assert caught.value.reason == "too_large"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    ),
    st.sampled_from(list(Calibration.__struct_fields__)),
)
def test_whatever_stands_in_a_field_is_a_curve_or_refused(value: object, field: str) -> None:
    """No other error, and a cost that is finite at every context."""
    payload = msgspec.json.encode({**msgspec.json.decode(to_json(curve())), field: value})
    try:
        found = read_calibration("m.vllm-410000", payload)
    except BadStateError:
        return
    assert 0 < found.cost.seconds(1_000_000) < float("inf")
