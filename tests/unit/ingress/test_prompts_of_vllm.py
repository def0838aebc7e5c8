"""What the front door makes of requests is, byte for byte, what vLLM 0.32's own code makes of them."""

from __future__ import annotations

import pytest

from tests.support.prompt_cases import GOLDEN, Case, cases, ours, read

CASES = list(zip(cases(), read(GOLDEN), strict=True))


@pytest.mark.parametrize(
    ("case", "text"), CASES, ids=[f"{case.endpoint}: {case.name}, {case.template}" for case, _ in CASES]
)
def test_the_prompt_is_vllms(case: Case, text: str | None) -> None:
    """Tools, developers, system messages, thoughts, calls and results, efforts, in each API and for templates that show
    different things. What vLLM refuses we may count: nobody is the worse for it."""
    if text is not None:
        assert ours(case) == text


def test_most_are_not_refused() -> None:
    """The table would prove nothing otherwise."""
    assert sum(text is not None for _, text in CASES) > 0.9 * len(CASES)
