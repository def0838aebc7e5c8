"""What users of the neighbouring projects report about KV-event streams and prefix indexes, and the tests that prove
the right behaviour here. A case that loses its proof, or a proof that no longer names its case, fails.

The numbers are those of the reports' list (A7, A8 and A12 are about other parts of those projects); ``R``: what a
stream needs besides, to recover.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

BRIDGE = "integration/bridge/test_bridge.py"
CHECKPOINT = "integration/bridge/test_checkpoint.py"
SOURCES = "integration/bridge/test_sources.py"
INDEXER = "integration/indexer/test_indexer.py"
PROCESSES = "integration/indexer/test_processes.py"
FIXTURES = "integration/indexer/test_replay_fixtures.py"
HEALTH = "integration/admission/test_source_health.py"
RECOVERY = "system/test_recovery.py"
EVENTS = "unit/kvcore/test_events.py"
INDEX = "unit/kvcore/test_index.py"
STREAM = "unit/kvcore/test_stream.py"

PROOFS: dict[str, dict[str, tuple[str, ...]]] = {
    "A1": {
        "a gap: live batches are held, the replay applied in order, duplicates dropped": (
            f"{BRIDGE}::test_gap_is_replayed_in_order",
            f"{INDEXER}::test_gap_is_repaired_before_what_follows",
            f"{STREAM}::test_gap_holds_live_batches_until_the_replay_is_applied",
        ),
        "history gone: cleared, degraded, and said until rebuilt": (
            f"{BRIDGE}::test_history_gone",
            f"{INDEXER}::test_history_gone_is_said",
            f"{FIXTURES}::test_captured_numbers_with_their_holes",
        ),
        "its health is one, in the fact, in answers and in decisions": (
            f"{HEALTH}::test_fact_answer_and_decision_agree_through_a_gap",
        ),
    },
    "A2": {
        "joined late: the past is asked for before anything is trusted": (
            f"{INDEXER}::test_late_indexer_and_late_bridge",
            f"{STREAM}::test_late_start_is_a_gap_from_zero",
        ),
    },
    "A3": {
        "the sequence returns to 0": (
            f"{BRIDGE}::test_restart_on_the_same_port",
            f"{INDEXER}::test_engine_restart",
            f"{STREAM}::test_restart_is_seen_by_number",
        ),
        "the numbers look continuous": (
            f"{FIXTURES}::test_restart_as_captured",
            f"{SOURCES}::test_restarted_engine_that_reaches_the_same_number_before_anybody_looks",
        ),
        "processes are never mixed, whatever comes late": (
            "unit/bridge/test_rank_processes.py::test_processes_are_told_apart",
            "integration/bridge/test_subscriber.py"
            "::test_batches_of_a_restarted_engine_never_come_before_the_end_of_the_old_one",
            "unit/bridge/test_checkpoint.py::test_a_checkpoint_is_for_its_process_only",
        ),
        "under load": (f"{RECOVERY}::test_one_after_the_other",),
    },
    "A4": {
        "a useless replay is asked a bounded number of times": (
            f"{BRIDGE}::test_useless_replay_is_asked_a_bounded_number_of_times",
            f"{STREAM}::test_a_replay_that_only_ends_is_asked_once",
        ),
    },
    "A5": {
        "arrays, maps and junk in one batch, in both envelopes": (
            f"{INDEXER}::test_mixed_encodings",
            f"{BRIDGE}::test_malformed_events_are_counted_and_forwarded",
            f"{EVENTS}::test_both_shapes_of_the_envelope",
        ),
    },
    "A6": {
        "replays with and without a topic frame, up to the end mark": (
            f"{BRIDGE}::test_both_replay_framings",
            "unit/kvcore/test_replay.py::test_captured_replays",
        ),
    },
    "A9": {
        "media by any name": (
            f"{EVENTS}::test_media",
            f"{EVENTS}::test_an_unknown_medium_is_the_lowest_tier_and_counted",
        ),
        "a store without tokens": (f"{INDEX}::test_a_store_without_tokens_resolves_through_its_hash",),
    },
    "A10": {
        "another block size than declared or expected": (
            f"{BRIDGE}::test_block_size_mismatch",
            f"{BRIDGE}::test_block_size_other_than_expected",
            f"{INDEXER}::test_mismatched_worker_is_blind",
            f"{HEALTH}::test_a_worker_of_another_block_size_is_said_everywhere",
        ),
        "no block size at start": (f"{BRIDGE}::test_block_size_unknown_until_events_tell",),
    },
    "A11": {
        "adapter, image and salt are part of the key": (
            f"{INDEX}::test_namespaces_never_match_each_other",
            f"{INDEX}::test_children_inherit_the_salt",
            f"{EVENTS}::test_an_adapter_is_not_an_image",
        ),
    },
    "A13": {
        "ranks are sources of their own, 0 included": (
            f"{BRIDGE}::test_ranks_are_told_apart",
            f"{INDEXER}::test_two_ranks",
            f"{FIXTURES}::test_two_ranks_as_captured",
            f"{SOURCES}::test_ranks_are_discovered",
        ),
        "ports that collide": (
            "unit/bridge/test_endpoints.py::test_port_collision_is_detected",
            "unit/bridge/test_rank.py::test_two_ranks_on_one_port_are_noticed",
        ),
    },
    "A14": {
        "predicted against reported, with an alarm": (
            f"{INDEXER}::test_parity_alarm",
            "system/test_approximate.py::test_a_wrong_index_is_noticed_and_left_and_taken_back",
        ),
    },
    "A15": {
        "leaving and silence are events with a reason": (
            f"{INDEXER}::test_leaving_and_silence",
            f"{BRIDGE}::test_engine_that_is_not_there_yet",
            "integration/ingress/test_failures.py::test_a_worker_that_falls_silent_gets_nothing_more",
        ),
    },
    "A16": {
        "an index that begins again is whole within seconds, under load": (
            f"{PROCESSES}::test_indexer_killed_under_load",
            f"{RECOVERY}::test_one_after_the_other",
            "integration/admission/test_own_index.py::test_a_restarted_admission_is_ready_when_its_index_is",
        ),
    },
    "R": {
        "a bridge that begins again goes on, also beyond the engine's replay buffer": (
            f"{PROCESSES}::test_bridge_killed_under_load",
            f"{CHECKPOINT}::test_bridge_and_indexer_come_back_with_more_than_the_engine_remembers",
            f"{CHECKPOINT}::test_checkpoint_that_cannot_be_used",
        ),
        "any of them and the bus die at once": (
            f"{RECOVERY}::test_at_the_same_moment",
            f"{RECOVERY}::test_with_the_bus",
        ),
        "concrete endpoints are bound, wildcards connected to, wrong guesses put right": (
            f"{SOURCES}::test_discovered_engine_that_connects_to_us",
            f"{BRIDGE}::test_engine_that_connects_to_us",
            f"{PROCESSES}::test_engine_address_is_enough",
            "unit/bridge/test_endpoints.py::test_wildcard_host_is_the_engines_host",
        ),
        "lost tails are found while the engine is idle": (
            f"{BRIDGE}::test_lost_tail_of_an_idle_engine",
            f"{STREAM}::test_heartbeats_find_a_lost_tail",
        ),
    },
}


@cache
def functions(path: Path) -> dict[str, str]:
    """Name and docstring of each test of a file."""
    tree = ast.parse(path.read_text())
    found = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {node.name: ast.get_docstring(node) or "" for node in found}


@pytest.mark.parametrize(
    ("case", "proof"),
    [(case, proof) for case, claims in PROOFS.items() for proofs in claims.values() for proof in proofs],
)
def test_proof_exists(case: str, proof: str) -> None:
    """The test is there, and its docstring names the case."""
    file, _, name = proof.partition("::")
    tests = functions(TESTS / file)
    assert name in tests
    assert case == "R" or re.search(rf"\b{case}\b", tests[name]), tests[name]


def test_every_case_has_its_proofs() -> None:
    """Every case that is about this part of the house, and none without a claim and a test."""
    assert sorted(PROOFS, key=lambda case: (case[:1], int(case[1:] or 0))) == [
        *(f"A{number}" for number in (1, 2, 3, 4, 5, 6, 9, 10, 11, 13, 14, 15, 16)),
        "R",
    ]
    assert all(claims and all(claims.values()) for claims in PROOFS.values())
