"""The work of a finished turn in GPU seconds: what a program has attained, and is ordered by (spec policy §4)."""

from __future__ import annotations

import math

import msgspec

from services.admission.estimators.errors import sample
from services.admission.estimators.reload_cost import H100_8B as RELOAD_H100_8B
from services.admission.estimators.reload_cost import ReloadCost

DECODE_SHARE = 8
"""Turns that share an iteration's floor while they decode (spec policy, Workloads)."""


class WorkCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants of one model on one kind of machine, in seconds (spec scheduling §4.2).

    ``per_token`` b, ``per_pair`` p (of a new token and one of its context), ``per_context_token`` k (read for each
    token of the answer), ``floor`` of an iteration. Raises `ValueError`.
    """

    per_token: float
    per_pair: float
    per_context_token: float
    floor: float

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"work cost: {name} must be a finite number, not negative")

    def seconds(self, prompt_tokens: int, output_tokens: int, previous_context: int = 0) -> float:
        """GPU seconds of a turn that found the context ``previous_context`` cached, whatever was really cached: work
        done twice is no progress. All in tokens. Raises `BadSampleError`.

        A prompt shorter than the previous context was rewritten (compaction): all of it is new.

        Source: spec policy §4: ``b*q + p*(n^2-m^2)/2 + out*(b + k*n + floor/8)``, q = n-m.
        """
        prompt = sample("prompt tokens", prompt_tokens)
        output = sample("output tokens", output_tokens)
        known = sample("previous context", previous_context)
        if known > prompt:
            known = 0.0
        prefill = self.per_token * (prompt - known) + self.per_pair * (prompt + known) * (prompt - known) / 2
        decode = output * (self.per_token + self.per_context_token * prompt + self.floor / DECODE_SHARE)
        return prefill + decode


H100_8B = WorkCost(per_token=2.59e-5, per_pair=1.05e-9, per_context_token=5.2e-8, floor=7.7e-3)
H100_70B = WorkCost(per_token=6.97e-5, per_pair=1.31e-9, per_context_token=3.3e-8, floor=18.8e-3)
"""Llama-3.1-8B on one H100, 70B on four (spec scheduling §4.2)."""

SCALED_AT = 8192
"""Tokens of the context at which two engines' prefill is compared."""


def work_cost_of(reload: ReloadCost) -> WorkCost:
    """The work of an engine whose reload curve was measured; how it decodes was not.

    A prompt's tokens cost what the curve says (spec scheduling §4.2: PR(n) = b*n + p/2*n^2). The floor of an iteration,
    which reads the weights, is taken to grow as prefill does; what is read of the context stays the default's.
    """
    factor = (reload.seconds(SCALED_AT) - reload.constant) / RELOAD_H100_8B.seconds(SCALED_AT)
    return WorkCost(
        per_token=reload.linear,
        per_pair=2 * reload.quadratic,
        per_context_token=H100_8B.per_context_token,
        floor=H100_8B.floor * factor,
    )
