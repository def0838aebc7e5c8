"""One request inside a simulated rank: sizes and positions, no tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from load.sim.content import Chain

if TYPE_CHECKING:
    from load.sim.span_cache import Hold


class SimRequest:
    """A prompt of ``prompt_tokens`` and the ``output_tokens`` that follow it, both on ``chain``.

    ``number`` identifies it; ``owner`` is the program whose pin it takes over. ``priority``: lower runs earlier (where
    the rank has priorities). ``cached_tokens``: found in the cache when it first left the queue; ``reused_tokens``:
    when it last did. Times are picoseconds: submitted, first scheduled, first token, finished.
    """

    __slots__ = (
        "admitted_ps",
        "arrival",
        "cached_tokens",
        "chain",
        "computed",
        "created_tokens",
        "finished_ps",
        "first_token_ps",
        "held",
        "holds",
        "length",
        "number",
        "output_tokens",
        "owner",
        "preemptions",
        "priority",
        "produced",
        "prompt_tokens",
        "registered",
        "reused_tokens",
        "submitted_ps",
    )

    def __init__(
        self,
        number: int,
        chain: Chain,
        prompt_tokens: int,
        output_tokens: int,
        *,
        priority: int = 0,
        owner: str | None = None,
    ) -> None:
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError("a request needs a prompt and an output of at least one token each")
        self.number = number
        self.chain = chain
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.priority = priority
        self.owner = owner
        self.arrival = 0
        self.length = prompt_tokens
        self.produced = 0
        self.computed = 0
        self.cached_tokens: int | None = None
        self.created_tokens = 0
        self.preemptions = 0
        self.holds: list[Hold] = []
        self.held = 0
        self.registered = 0
        self.reused_tokens = 0
        self.submitted_ps = 0
        self.admitted_ps: int | None = None
        self.first_token_ps: int | None = None
        self.finished_ps: int | None = None

    @property
    def remaining(self) -> int:
        """Tokens whose KV is not computed yet."""
        return self.length - self.computed

    @property
    def longest(self) -> int:
        """Tokens that it can ever hold in the cache: the last one produced is never computed."""
        return self.prompt_tokens + self.output_tokens - 1
