"""Calibration without an engine: contexts, prompts, the answer's stream, the curve through measurements."""

from __future__ import annotations

import random

import pytest

from load.engine.timing import H100_8B, H100_70B, Profile
from schemas.worker import WorkerProfile
from services.admission.estimators.reload_cost import H100_8B as PR_8B
from services.admission.estimators.reload_cost import H100_70B as PR_70B
from services.admission.estimators.reload_cost import ReloadCost
from tidegate.calibrate.engine import base_url
from tidegate.calibrate.sweep import (
    OVERHEAD_TOKENS,
    PLAIN_TOKENS,
    Prompts,
    Run,
    Subject,
    choose_contexts,
    to_calibration,
)
from tidegate.errors import CalibrationError, WrongUseError

BATCH = 2048
HTTP_S = 0.002
CONTEXTS = (1000, 2000, 4000, 8000, 16_000, 32_000, 64_000, 131_071)


def subject(max_model_len: int | None = 131_072, kv_tokens: int | None = 412_000) -> Subject:
    profile = WorkerProfile(
        url="http://e", model="m", engine="vllm", block_size=16, kv_tokens=kv_tokens, max_model_len=max_model_len
    )
    return Subject(profile, "m", "engine-1")


def ttft_s(profile: Profile, tokens: int) -> float:
    """Of a prompt alone in an engine of this profile, in chunks of 2048."""
    seconds = HTTP_S
    for start in range(0, tokens, BATCH):
        chunk = min(BATCH, tokens - start)
        seconds += profile.step_s(chunk, chunk * (start + chunk / 2), 0)
    return seconds


@pytest.mark.parametrize(("profile", "cost"), [(H100_8B, PR_8B), (H100_70B, PR_70B)])
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_the_curve_of_a_known_engine_comes_back(profile: Profile, cost: ReloadCost, noise: float) -> None:
    """Spec scheduling §4.2: PR(n) of both profiles within 7 % from 4000 tokens on, of which 5 % are the constant of
    every iteration, which the table leaves out; also with a per cent of noise. The overhead is no part of the curve."""
    chance = random.Random(4)
    runs = {n: [Run(n, ttft_s(profile, n) * (1 + noise * chance.gauss(0, 1))) for _ in range(3)] for n in CONTEXTS}
    overhead = [Run(OVERHEAD_TOKENS, ttft_s(profile, OVERHEAD_TOKENS))] * 5
    found = to_calibration(subject(), overhead, runs, forced=False, at_ms=7)
    curve = ReloadCost(quadratic=found.quadratic, linear=found.linear, constant=found.constant)
    for n in (4000, 10_000, 20_000, 40_000, 70_000, 128_000):
        assert curve.seconds(n) == pytest.approx(cost.seconds(n), rel=0.07)
    assert curve.seconds(1000) == pytest.approx(cost.seconds(1000), rel=0.10)
    assert found.worst < 0.02 + 3 * noise
    assert found.worst_tokens in CONTEXTS
    assert found.overhead_s == ttft_s(profile, OVERHEAD_TOKENS)
    assert (found.model, found.engine, found.kv_tokens, found.worker) == ("m", "vllm", 412_000, "engine-1")
    assert [point.tokens for point in found.points] == list(CONTEXTS)


def test_the_median_counts() -> None:
    """One run out of three that was disturbed does not show."""
    overhead = [Run(OVERHEAD_TOKENS, ttft_s(H100_8B, OVERHEAD_TOKENS))]
    clean = {n: [Run(n, ttft_s(H100_8B, n))] * 3 for n in CONTEXTS}
    disturbed = {n: [*several[:2], Run(n, 10 * several[0].ttft_s)] for n, several in clean.items()}
    one, two = (to_calibration(subject(), overhead, runs, forced=False, at_ms=0) for runs in (clean, disturbed))
    assert (one.quadratic, one.linear, one.constant) == (two.quadratic, two.linear, two.constant)


def test_times_that_do_not_grow_are_no_curve() -> None:
    """Something answered that did not compute: said, with what to do."""
    runs = {n: [Run(n, 0.01)] for n in (1000, 2000, 4000)}
    with pytest.raises(CalibrationError, match=r"does not grow with the context.*--max-context"):
        to_calibration(subject(), [Run(OVERHEAD_TOKENS, 0.01)], runs, forced=False, at_ms=0)


@pytest.mark.parametrize(
    ("engine", "wanted", "most", "contexts"),
    [
        (subject(), (), None, CONTEXTS),
        (subject(), (), 10_000, (1000, 2000, 4000, 8000, 10_000)),
        (subject(128_001), (), None, (1000, 2000, 4000, 8000, 16_000, 32_000, 64_000, 128_000)),
        (subject(131_072, 20_000), (), None, (1000, 2000, 4000, 8000, 16_000, 19_968)),
        (subject(2049), (), None, (256, 512, 1024, 2048)),
        (subject(None, None), (), 5000, (1000, 2000, 4000, 5000)),
        (subject(), (8000, 100, 3000, 100), None, (100, 3000, 8000)),
    ],
)
def test_contexts(engine: Subject, wanted: tuple[int, ...], most: int | None, contexts: tuple[int, ...]) -> None:
    """Spec scheduling §1.3: {1000, 2000, 4000, ..., max}; one token of the window, and the KV cache, bound it."""
    assert choose_contexts(engine, wanted, most) == contexts


@pytest.mark.parametrize(
    ("engine", "wanted", "most", "said"),
    [
        (subject(), (), 131_072, "up to 131071 tokens.*not 131072.*--max-context"),
        (subject(4096), (1000, 2000, 5000), None, "up to 4095 tokens.*--contexts"),
        (subject(None, None), (), None, "does not tell.*--max-context"),
        (subject(100), (), None, "too short"),
        (subject(), (1000, 2000), None, "3 to 64 different"),
        (subject(), (10, 2000, 3000), None, "over 16 tokens"),
        (subject(), tuple(range(1000, 1065)), None, "3 to 64 different"),
    ],
)
def test_contexts_that_cannot_be(engine: Subject, wanted: tuple[int, ...], most: int | None, said: str) -> None:
    """Told before anything is sent, with the option to change."""
    with pytest.raises(WrongUseError, match=said):
        choose_contexts(engine, wanted, most)


def test_prompts_share_no_block() -> None:
    """Neither with each other nor with those of another run; of ids that the vocabulary has."""
    first, second = Prompts(1), Prompts(2, range(500, 600))
    drawn = [tuple(prompts.draw(16)) for prompts in (first, second) for _ in range(200)]
    assert len(set(drawn)) == 400
    assert set(first.draw(1000)) <= set(PLAIN_TOKENS)
    assert set(second.draw(1000)) <= set(range(500, 600))
    assert set(Prompts(3, [7, 7, 8]).draw(1000)) <= set(PLAIN_TOKENS)


def test_addresses() -> None:
    """With or without /v1, and never with a password."""
    assert (
        base_url("http://h:8000")
        == base_url("http://h:8000/v1/")
        == base_url("http://u:p@h:8000/v1")
        == "http://h:8000"
    )
    assert base_url("http://h/prefix/v1") == "http://h/prefix"
    assert base_url("https://u:p@h:8443/v1") == "https://h:8443"
    for url in ("ftp://h", "h:8000", ""):
        with pytest.raises(WrongUseError, match="write http://HOST:PORT"):
            base_url(url)
