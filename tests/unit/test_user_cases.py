"""What users of the neighbouring projects report, and the tests that prove the right behaviour here. A case that loses
its proof, or a proof that no longer names its case, fails.

The numbers are those of the reports' list (those that are missing are about parts of those projects that we have not);
``R``: what a stream of KV events needs besides, to recover.
"""

from __future__ import annotations

import re

import pytest

from tests.support.proofs import docstring

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

ASKS = "unit/admission/test_asks.py"
DOOR = "integration/ingress/test_front_door.py"
FAILURES = "integration/ingress/test_failures.py"
INGRESS = "unit/ingress/test_core.py"
SSE = "unit/ingress/test_sse.py"

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
    "B1": {
        "the worker leaves between decision and dispatch: decided anew at once, bound to nothing": (
            f"{ASKS}::test_a_granted_worker_that_left_before_dispatch_is_decided_anew",
            f"{INGRESS}::test_one_retry_on_another_worker_before_the_first_byte",
            "unit/admission/test_sessions.py::test_a_lost_worker_is_forgotten_by_every_session",
        ),
        "nobody waits for ever": (f"{ASKS}::test_waiters_are_refused_at_once_when_the_last_worker_is_lost",),
    },
    "B2": {
        "clients leave anywhere: freed once, closed upstream, one row each": (
            "integration/ingress/test_aborts.py::test_500_clients_that_leave_anywhere",
            f"{INGRESS}::test_the_client_goes_in_every_state",
        ),
        "what comes late of it changes nothing": (
            "unit/admission/test_lost.py::test_a_request_that_ended_before_its_ask_arrived_gets_nothing",
        ),
    },
    "B5": {"one table says whose request it is": ("unit/ingress/test_identity.py::test_oracle",)},
    "B6": {
        "long prompts hold no probe up": (f"{DOOR}::test_probes_answer_while_long_prompts_are_counted",),
        "over the bound they are placed without their tokens": (
            "integration/ingress/test_tokenizing.py::test_over_the_bound_is_skipped_at_once",
        ),
    },
    "B7": {
        "no worker yet: not ready, 503 with Retry-After": (
            f"{DOOR}::test_without_workers_it_is_not_ready_and_answers_503",
            f"{ASKS}::test_no_worker_is_503_with_retry_after_and_an_unknown_model_404",
        ),
    },
    "C1": {
        "any cut, any line end: the same bytes": (
            f"{SSE}::test_any_two_pieces",
            f"{SSE}::test_dribble",
            f"{DOOR}::test_a_stream_passes_byte_for_byte_wherever_it_is_cut",
        ),
        "an event of megabytes is an error": (f"{DOOR}::test_an_event_over_the_limit_ends_the_stream_not_the_process",),
    },
    "C2": {
        "before the first byte: once more, elsewhere": (
            f"{FAILURES}::test_an_engine_that_dies_before_its_first_byte",
            f"{INGRESS}::test_one_retry_on_another_worker_before_the_first_byte",
        ),
        "after it: an error event in the API's own shape, no retry": (
            f"{FAILURES}::test_an_engine_that_dies_in_its_answer",
            f"{INGRESS}::test_after_the_first_byte_there_is_no_retry",
            "integration/ingress/test_apis.py::test_an_engine_that_dies",
            "system/test_kill.py::test_a_killed_engine_fails_only_what_it_was_streaming",
        ),
    },
    "C3": {
        "usage in every form, asked for or not": (
            f"{FAILURES}::test_usage_in_every_form",
            f"{DOOR}::test_usage_is_asked_for_and_its_chunk_kept_from_those_who_did_not",
        ),
        "none: estimated, and said so": ("unit/ingress/test_rows.py::test_missing_usage_is_estimated_and_said_so",),
    },
    "C4": {
        "comments while a stream waits, only where asked for": (
            "unit/ingress/test_waiting.py::test_a_held_stream_is_told_so_as_often_as_wanted_until_its_engine_answers",
            "unit/ingress/test_waiting.py::test_nobody_else_is_told",
        ),
    },
    "C5": {
        "lines and marks that change with each request break no prefix, and no body is touched": (
            "unit/ingress/test_prompts.py::test_the_billing_line_breaks_no_prefix",
            "unit/ingress/test_prompts.py::test_rolling_cache_marks_and_shapes_do_not_show",
        ),
        "where two prompts part": ("unit/ingress/test_tokens.py::test_where_two_prompts_part",),
    },
    "C6": {
        "what cannot be scored is placed by load, never a 500": (
            f"{INGRESS}::test_what_cannot_be_scored_is_asked_for_at_once",
            "unit/ingress/test_hostile_prompts.py::test_no_prompt_raises",
        ),
        "count_tokens is no turn": ("integration/ingress/test_apis.py::test_token_counts_are_the_engines",),
    },
    "C8": {
        "headers by a list": (f"{DOOR}::test_the_forward_list",),
        "a client's 4xx harms no worker": (
            f"{DOOR}::test_client_errors_pass_unchanged_and_harm_no_worker",
            "integration/ingress/test_breaker.py::test_clients_faults_open_nothing",
        ),
    },
    "C9": {
        "nobody decides: placed by the hash, and marked": (
            f"{INGRESS}::test_without_a_leader_a_session_has_its_place",
            f"{DOOR}::test_the_bus_goes_away_and_requests_are_still_served",
            "integration/ingress/test_partition.py::test_a_front_door_that_is_cut_off_serves_on",
        ),
        "or refused, where that is wanted": (
            "integration/ingress/test_asking.py::test_nobody_answers_and_fallback_is_off",
        ),
    },
    "D1": {
        "our own grants count until the scrape has them": (
            f"{ASKS}::test_a_stale_scrape_does_not_move_the_burst",
            "integration/admission/test_admission.py::test_a_burst_of_a_hundred_asks_spreads_over_the_workers",
        ),
    },
    "D3": {
        "what was booked is reversed exactly, once": (
            "unit/admission/test_grants.py::test_release_reverses_exactly_what_was_booked",
            f"{ASKS}::test_a_cancelled_waiter_leaves_the_line_and_a_cancelled_grant_is_released",
        ),
        "no shared default session": (
            "unit/admission/test_sessions.py::test_a_request_without_identity_is_a_session_that_closes_with_it",
        ),
    },
    "D4": {
        "a bounded line, in order within a session, then 429": (
            f"{ASKS}::test_a_full_queue_refuses_with_429_and_a_deadline_with_503",
            "integration/admission/test_admission.py::test_held_replies_keep_coming_until_a_place_is_free",
        ),
    },
    "E1": {
        "too large is refused by name, before it is sent": (
            "integration/bus/test_messages.py::test_too_large_is_refused_before_it_is_sent",
        ),
        "what a slow consumer loses is counted": (
            "integration/bus/test_messages.py::test_slow_consumer_drops_are_counted",
        ),
        "a bus that hangs, dies and comes back loses no row": (
            "integration/bus/test_real_server.py::test_a_hanging_server_blocks_nobody",
            "integration/bus/test_real_server.py::test_a_crash_loses_no_stored_row",
            "integration/bus/test_rows.py::test_rows_wait_for_the_server_and_are_stored_once",
        ),
    },
    "E2": {
        "SIGTERM loses no row": (
            f"{FAILURES}::test_sigterm_lets_streams_finish_and_loses_no_row",
            "integration/recorder/test_recorder.py::test_a_term_signal_during_load_loses_no_row",
        ),
        "and no file is torn": ("system/test_kill_recording.py::test_rows_on_the_disk_are_the_requests_that_ended",),
    },
    "E4": {
        "no bus at the start: waited for, with one clear line": (
            "integration/bus/test_service.py::test_starts_without_a_bus_and_becomes_ready_when_it_appears",
        ),
    },
    "F1": {
        "internal headers in no spelling": (
            f"{DOOR}::test_internal_headers_of_clients_never_reach_an_engine",
            "unit/ingress/test_forwarding.py::test_internal_names_pass_in_no_spelling_and_under_no_setting",
        ),
        "a session id names no address": ("integration/ingress/test_keys.py::test_a_session_id_is_never_an_address",),
    },
    "F2": {
        "the tenant's salt, derived, whatever a client says": (
            "unit/ingress/test_salt.py::test_the_clients_salt_never_reaches_an_engine",
        ),
        "no two tenants meet": ("unit/ingress/test_salt.py::test_no_two_namespaces_meet",),
    },
    "F4": {"an address for everybody is warned of": (f"{FAILURES}::test_an_exposed_address_warns",)},
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


@pytest.mark.parametrize("case", PROOFS)
def test_proofs_exist(case: str) -> None:
    """The tests are there, and their docstrings name the case."""
    said = {proof: docstring(proof) for proofs in PROOFS[case].values() for proof in proofs}
    unnamed = {proof: text for proof, text in said.items() if not re.search(rf"\b{case}\b", text)}
    assert case == "R" or unnamed == {}


def test_every_case_has_its_proofs() -> None:
    """Every case of the list, and none without a claim and a test."""
    assert sorted(PROOFS, key=lambda case: (case[:1], int(case[1:] or 0))) == [
        *(f"A{number}" for number in (1, 2, 3, 4, 5, 6, 9, 10, 11, 13, 14, 15, 16)),
        *(f"B{number}" for number in (1, 2, 5, 6, 7)),
        *(f"C{number}" for number in (1, 2, 3, 4, 5, 6, 8, 9)),
        *(f"D{number}" for number in (1, 3, 4)),
        *(f"E{number}" for number in (1, 2, 4)),
        *(f"F{number}" for number in (1, 2, 4)),
        "R",
    ]
    assert all(claims and all(claims.values()) for claims in PROOFS.values())
