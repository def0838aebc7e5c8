"""How long one iteration of a real engine takes (spec: scheduling §4.2), as data.

``t = max(floor, a + b*Q) + p*sum(q*(ctx + q/2)) + k*sum(decode ctx) + host``, milliseconds; ``Q``: tokens of this
iteration; the second sum runs over prefill chunks of ``q`` tokens after ``ctx`` cached ones, the third over decodes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Profile:
    """Constants of one model on one kind of machine. Milliseconds; ``kv_tokens``: KV capacity of a rank in tokens.
    ``kv_bytes``: of one token, on each of its GPUs."""

    name: str
    floor_ms: float
    base_ms: float
    per_token_ms: float
    per_pair_ms: float
    per_context_token_ms: float
    host_ms: float
    kv_tokens: int
    kv_bytes: int = 128 * 1024

    def step_s(self, tokens: int, prefill_pairs: float, decode_context: int) -> float:
        """Seconds of one iteration. ``prefill_pairs``: sum of ``q*(ctx + q/2)`` in token pairs."""
        body = max(self.floor_ms, self.base_ms + self.per_token_ms * tokens)
        attention = self.per_pair_ms * prefill_pairs + self.per_context_token_ms * decode_context
        return (body + attention + self.host_ms) / 1000


H100_8B = Profile("h100-8b", 7.7, 2.5, 0.0259, 1.05e-6, 5.2e-5, 0.0, 412_000)
H100_70B = Profile("h100x4-70b", 18.8, 5.8, 0.0697, 1.31e-6, 3.3e-5, 0.0, 424_000, 80 * 1024)
INSTANT = Profile("instant", 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 412_000)

PROFILES = {profile.name: profile for profile in (H100_8B, H100_70B, INSTANT)}
"""``instant`` takes no time at all: for tests of everything but time."""
