"""The stored reload curve: its bytes, its key, and its bounds."""

from __future__ import annotations

import pytest

from bus.subjects import calibration
from schemas.base import BadMessageError, from_json, to_json
from schemas.calibration import MAX_POINTS, Calibration, CalibrationPoint, engine_profile

SAMPLE = Calibration(
    model="org/model-8b",
    engine="vllm",
    kv_tokens=412_352,
    engine_version="0.32.0",
    max_model_len=131_072,
    worker="engine-1",
    url="http://10.0.0.5:8000",
    at_ms=1_760_000_000_123,
    quadratic=5.25e-10,
    linear=2.7e-05,
    fitted_constant=0.004,
    overhead_s=0.0095,
    error_s=0.0004,
    worst=0.006,
    worst_tokens=4000,
    points=(CalibrationPoint(tokens=4000, runs_s=(0.12, 0.119, 0.121), seconds=0.12),),
)
GOLDEN = (
    b'{"model":"org/model-8b","engine":"vllm","kv_tokens":412352,"engine_version":"0.32.0","max_model_len":131072,'
    b'"worker":"engine-1","url":"http://10.0.0.5:8000","at_ms":1760000000123,"quadratic":5.25e-10,"linear":0.000027,'
    b'"fitted_constant":0.004,"overhead_s":0.0095,"error_s":0.0004,"worst":0.006,"worst_tokens":4000,'
    b'"points":[{"tokens":4000,"runs_s":[0.12,0.119,0.121],"seconds":0.12}]}'
)


def test_golden_bytes() -> None:
    """What is stored today is read tomorrow; a field of a newer writer is ignored."""
    assert to_json(SAMPLE) == GOLDEN
    assert from_json(GOLDEN, Calibration) == SAMPLE
    assert from_json(b'{"future_field":[1],' + GOLDEN[1:], Calibration) == SAMPLE


def test_the_key_is_of_model_and_profile() -> None:
    """Whatever the model is called; a restart with a few blocks more has the same profile."""
    assert SAMPLE.profile == "vllm-410000"
    assert engine_profile("vllm", 409_000) == engine_profile("vllm", 412_352)
    assert engine_profile("vllm", 424_000) != engine_profile("vllm", 96_000)
    assert engine_profile("unknown", None) == "unknown"
    assert calibration(SAMPLE.model, SAMPLE.profile) == "org=2Fmodel-8b.vllm-410000"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"quadratic":5.25e-10', b'"quadratic":-1.0'),
        (b'"linear":0.000027', b'"linear":1e300'),
        (b'"linear":0.000027', b'"linear":"fast"'),
        (b'"model":"org/model-8b"', b'"model":""'),
        (b'"tokens":4000', b'"tokens":0'),
        (b'"tokens":4000', b'"tokens":9000000000000'),
        (b'"runs_s":[0.12,0.119,0.121]', b'"runs_s":[]'),
        (b'"points":[{"tokens":4000,"runs_s":[0.12,0.119,0.121],"seconds":0.12}]', b'"points":[]'),
    ],
)
def test_what_is_no_measurement_is_not_read(old: bytes, new: bytes) -> None:
    """Out of range, of the wrong type, or nothing measured."""
    assert old in GOLDEN
    with pytest.raises(BadMessageError):
        from_json(GOLDEN.replace(old, new), Calibration)


def test_points_are_bounded() -> None:
    """More than a sweep has."""
    point = to_json(SAMPLE.points[0])
    many = GOLDEN.replace(point, b",".join([point] * (MAX_POINTS + 1)))
    with pytest.raises(BadMessageError):
        from_json(many, Calibration)
