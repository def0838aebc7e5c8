"""One request inside the engine core: its tokens, its blocks, how far it is."""

from __future__ import annotations

from array import array
from typing import Literal

from load.engine.block_hash import ExtraKeys
from load.engine.tool_pins import JobStep

FinishReason = Literal["stop", "length", "abort"]

NO_EXTRA = ExtraKeys()


class EngineRequest:
    """A prompt and the output that will be generated for it, one token a step.

    ``prompt`` and ``output`` are arrays of unsigned 32-bit token ids; ``output`` is known from the start (nothing is
    sampled here) and holds at least one token. ``finish_reason`` is how it ends. ``priority``: lower runs earlier.
    ``in_pool``: the blocks that a shared pool said to have when the request arrived. ``job_step``: of the job that it
    says to be a step of.
    """

    __slots__ = (
        "arrival",
        "blocks",
        "cached_tokens",
        "computed",
        "created_tokens",
        "digests",
        "extra",
        "finish_reason",
        "in_pool",
        "job_step",
        "output",
        "preemptions",
        "priority",
        "produced",
        "prompt_tokens",
        "registered",
        "request_id",
        "session_id",
        "tokens",
    )

    def __init__(
        self,
        request_id: str,
        prompt: array[int],
        output: array[int],
        *,
        finish_reason: FinishReason = "length",
        priority: int = 0,
        extra: ExtraKeys = NO_EXTRA,
        session_id: str | None = None,
        job_step: JobStep | None = None,
    ) -> None:
        if not prompt or not output:
            raise ValueError("a request needs a prompt and an output of at least one token each")
        self.request_id = request_id
        self.tokens = array("I", prompt)
        self.output = output
        self.finish_reason: FinishReason = finish_reason
        self.priority = priority
        self.extra = extra
        self.session_id = session_id
        self.job_step = job_step
        self.in_pool = range(0)
        self.prompt_tokens = len(prompt)
        self.arrival = 0
        self.produced = 0
        self.computed = 0
        self.blocks: list[int] = []
        self.digests: list[bytes] = []
        self.registered = 0
        self.cached_tokens: int | None = None
        self.created_tokens = 0
        self.preemptions = 0

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the output so far."""
        return len(self.tokens)

    @property
    def remaining(self) -> int:
        """Tokens whose KV is not computed yet."""
        return len(self.tokens) - self.computed

    @property
    def longest(self) -> int:
        """Tokens that it can ever hold in the cache: the last one produced is never computed."""
        return self.prompt_tokens + len(self.output) - 1
