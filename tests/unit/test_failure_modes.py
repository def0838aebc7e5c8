"""What fails, what users see of it, and the tests that prove it: the rows of docs/failures.md. A row that loses a
proof, and a row of the page that nothing proves, fails."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.proofs import docstring

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "failures.md").read_text()

ADMISSION = "integration/admission/test_admission.py"
APIS = "integration/ingress/test_apis.py"
ASKING = "integration/ingress/test_asking.py"
ASKS = "unit/admission/test_asks.py"
CLOCK = "unit/admission/test_clock.py"
BREAKER = "integration/ingress/test_breaker.py"
CLUSTER = "integration/bus/test_cluster.py"
DOOR = "integration/ingress/test_front_door.py"
FAILURES = "integration/ingress/test_failures.py"
HELD = "integration/ingress/test_held_comments.py"
INGRESS = "unit/ingress/test_core.py"
KILL = "system/test_kill.py"
LOST = "unit/admission/test_lost.py"
OUTAGE = "integration/bus/test_outage.py"
OWN_INDEX = "integration/admission/test_own_index.py"
PARTITION = "integration/ingress/test_partition.py"
PROCESSES = "integration/indexer/test_processes.py"
RECORDER = "integration/recorder/test_recorder.py"
TAKEOVER = "integration/admission/test_takeover.py"

PARTS: dict[str, tuple[str, ...]] = {
    "indexer": (
        f"{OWN_INDEX}::test_decisions_are_exact_without_any_indexer",
        f"{ADMISSION}::test_without_an_index_turns_run_and_say_blind",
        f"{ASKS}::test_without_an_index_decisions_go_on_by_affinity_and_load",
        f"{PROCESSES}::test_indexer_killed_under_load",
        f"{KILL}::test_no_client_notices_the_death_of",
    ),
    "admission leader dies": (
        f"{TAKEOVER}::test_nothing_of_the_budget_is_lost_or_doubled_when_leaders_die",
        f"{ADMISSION}::test_a_standby_takes_over_within_two_seconds_of_a_killed_leader",
        f"{ADMISSION}::test_a_clean_stop_hands_the_lead_over_at_once",
        f"{ADMISSION}::test_a_restarted_leader_is_back_within_two_seconds_with_the_same_books",
        f"{ASKING}::test_a_held_request_whose_keep_alive_stops_is_asked_again",
        f"{ASKS}::test_a_new_leader_knows_a_turn_that_is_sent_again",
        f"{LOST}::test_a_restarted_leader_rebuilds_its_grants_from_heartbeats_alone",
        "system/test_kill_holding.py::test_a_standby_goes_on_holding_when_the_leader_dies",
    ),
    "admission leader is cut off, or sleeps": (
        f"{TAKEOVER}::test_a_leader_that_is_cut_off_is_followed_and_decides_nothing_after_it",
        f"{ADMISSION}::test_a_leader_that_slept_through_its_lease_says_nothing_more",
        f"{ASKING}::test_of_two_leaders_the_newer_one_is_followed",
        "unit/bus/test_leadership.py::test_doubt_ends_when_its_time_is_over_or_nobody_tries",
    ),
    "no admission at all": (
        f"{INGRESS}::test_without_a_leader_a_session_has_its_place",
        f"{ASKING}::test_fallback_sends_a_session_to_the_same_worker",
        f"{ASKING}::test_a_silent_leader_is_given_up_after_the_idle_time",
        f"{ASKING}::test_nobody_answers_and_fallback_is_off",
        f"{PARTITION}::test_front_doors_that_ask_nobody_place_a_session_alike",
        f"{LOST}::test_an_ingress_that_chose_by_itself_is_accounted_and_its_ask_dropped",
        "unit/ingress/test_workers.py::test_placement_is_stable",
    ),
    "hints": (
        f"{KILL}::test_no_client_notices_the_death_of",
        "integration/hints/test_softness.py::test_hints_that_are_carried_out_lost_or_unsupported_change_no_answer",
        "integration/hints/test_hints.py::test_commands_reach_the_worker_results_are_counted_and_a_restart_leads_again",
    ),
    "recorder": (
        f"{KILL}::test_no_client_notices_the_death_of",
        f"{RECORDER}::test_kills_neither_lose_nor_double_rows",
        f"{RECORDER}::test_the_bus_may_be_killed_and_come_back",
        f"{RECORDER}::test_a_disk_that_refuses_holds_rows_back_and_loses_none",
    ),
    "NATS, all of it": (
        f"{DOOR}::test_the_bus_goes_away_and_requests_are_still_served",
        f"{DOOR}::test_a_bus_that_hangs_is_an_outage_too",
        f"{PARTITION}::test_a_front_door_that_is_cut_off_serves_on",
        f"{INGRESS}::test_the_last_worker_list_outlives_an_outage_of_our_bus",
        f"{LOST}::test_nobody_is_lost_while_we_could_not_listen",
        f"{OUTAGE}::test_the_buffer_while_away_is_bounded_and_counted",
        "integration/bus/test_rows.py::test_a_full_window_refuses_and_counts",
        f"{KILL}::test_a_killed_bus_is_survived",
    ),
    "one NATS server of three": (
        f"{TAKEOVER}::test_a_server_of_the_bus_dies_and_the_leader_decides_on",
        f"{CLUSTER}::test_who_leads_goes_on_while_the_servers_elect",
        f"{CLUSTER}::test_one_of_three_is_killed_while_rows_are_written_and_somebody_leads",
        "unit/bus/test_leadership.py::test_a_holder_whose_renewals_nobody_takes_leads_on_while_the_key_is_its_own",
        "unit/bus/test_leadership.py::test_a_standby_that_could_not_look_counts_anew",
    ),
    "NATS answers slowly": (
        "integration/bus/test_leadership.py::test_a_server_that_is_slow_ends_no_leadership",
        "unit/bus/test_leadership.py::test_a_late_answer_counts_from_when_its_renewal_was_sent",
        "unit/bus/test_leadership.py::test_one_whose_lease_ran_out_leads_again_by_a_renewal_that_nobody_forestalled",
        "integration/bus/test_leadership.py::test_a_leader_whose_bus_hangs_stops_by_itself_and_leads_again_after_it",
    ),
    "engine before its first byte": (
        f"{FAILURES}::test_an_engine_that_dies_before_its_first_byte",
        f"{FAILURES}::test_a_503_is_retried_and_the_second_failure_passed_on",
        f"{FAILURES}::test_a_redirect_is_neither_followed_nor_passed_on",
        f"{INGRESS}::test_one_retry_on_another_worker_before_the_first_byte",
        f"{INGRESS}::test_no_retry_where_it_cannot_help",
        f"{INGRESS}::test_what_comes_late_of_the_first_attempt_is_ignored",
        f"{ASKS}::test_a_second_attempt_releases_the_first_and_goes_elsewhere",
        f"{APIS}::test_an_engine_that_dies",
    ),
    "engine after its first byte": (
        f"{FAILURES}::test_an_engine_that_dies_in_its_answer",
        f"{INGRESS}::test_after_the_first_byte_there_is_no_retry",
        "unit/ingress/test_replies.py::test_an_error_inside_a_stream_is_one_whole_event",
        f"{LOST}::test_a_session_whose_answer_broke_off_is_placed_anew",
        f"{KILL}::test_a_killed_engine_fails_only_what_it_was_streaming",
    ),
    "engine that hangs": (
        f"{FAILURES}::test_each_time_out_is_named",
        "integration/web/test_client.py::test_each_silence_has_its_name",
        f"{BREAKER}::test_a_process_that_hangs_and_one_that_is_gone",
        "integration/web/test_client.py::test_what_came_while_we_were_away_is_read_before_anybody_is_blamed",
    ),
    "engine on which everything fails": (
        f"{BREAKER}::test_an_engine_that_answers_503_is_left_alone_tried_and_taken_back",
        f"{BREAKER}::test_while_it_is_open_no_request_goes_there",
        f"{BREAKER}::test_where_all_are_open_all_are_tried",
        f"{BREAKER}::test_clients_faults_open_nothing",
        "unit/ingress/test_breaker.py::test_one_probe_at_a_time_and_longer_after_each_that_fails",
    ),
    "bridge": (
        f"{PROCESSES}::test_bridge_killed_under_load",
        f"{OWN_INDEX}::test_a_bridge_that_begins_again_is_followed",
        f"{FAILURES}::test_a_worker_that_falls_silent_gets_nothing_more",
        f"{LOST}::test_a_bridge_that_begins_again_loses_nobody",
    ),
    "front door dies": (
        f"{KILL}::test_a_killed_front_door_owes_no_row_and_no_grant",
        f"{ADMISSION}::test_a_lost_ingress_leaves_exactly_one_end_and_one_row_per_request",
        f"{LOST}::test_a_newer_epoch_of_the_same_ingress_ends_the_older_ones_requests_at_once",
    ),
    "admission's clock is set back": (
        f"{CLOCK}::test_a_grant_that_nobody_names_lapses_after_its_time_by_the_new_clock",
        f"{CLOCK}::test_nobody_is_lost_by_it_and_who_is_silent_then_is_lost_in_time",
        f"{CLOCK}::test_who_waits_is_told_so_and_refused_in_time",
        f"{CLOCK}::test_the_scheduling_policys_time_goes_on",
    ),
    "everything full": (
        f"{ASKS}::test_a_full_queue_refuses_with_429_and_a_deadline_with_503",
        f"{ASKING}::test_a_refusal_is_what_the_client_sees",
        f"{FAILURES}::test_too_many_requests_in_flight_are_429",
        "integration/ingress/test_memory.py::test_bodies_over_what_may_be_held_are_refused_in_the_api_s_shape",
        f"{HELD}::test_a_refusal_in_the_stream_is_an_error_to_the_openai_client",
    ),
}
"""What fails, in the page's words."""

PROMISES: dict[str, tuple[str, ...]] = {
    "four time-outs of an engine, each with its own code": (
        f"{FAILURES}::test_each_time_out_is_named",
        "integration/web/test_client.py::test_a_full_backlog_is_a_connect_timeout",
        "integration/web/test_client.py::test_nobody_listens",
    ),
    "one engine for one request": (
        f"{INGRESS}::test_a_request_from_beginning_to_end",
        f"{INGRESS}::test_one_retry_on_another_worker_before_the_first_byte",
    ),
    "a turn that is sent again counts once": (
        f"{ASKS}::test_a_turn_that_is_sent_again_is_the_same_turn",
        f"{ASKS}::test_a_new_leader_knows_a_turn_that_is_sent_again",
        f"{ASKS}::test_asking_again_returns_the_same_grant",
        "integration/ingress/test_many_processes.py::test_a_turn_that_is_sent_again_to_both_is_accounted_once",
        "integration/bus/test_stored.py::test_a_repeated_row_is_stored_once",
    ),
    "Codex's turn state": (
        "integration/ingress/test_turn_states.py::test_a_turn_goes_on_where_it_ran_also_by_another_front_door",
        "unit/ingress/test_turn_state.py::test_no_character_of_it_can_be_changed",
        "unit/ingress/test_turn_state.py::test_a_worker_that_cannot_take_it_means_nothing",
    ),
    "comments while a stream is held": (
        f"{HELD}::test_a_held_stream_begins_with_comments_and_goes_on_with_its_engines_bytes",
        f"{HELD}::test_a_client_that_leaves_its_held_stream_frees_the_hold_once",
        "unit/ingress/test_waiting.py::test_nobody_else_is_told",
    ),
    "a front door that is told to stop": (
        f"{FAILURES}::test_sigterm_lets_streams_finish_and_loses_no_row",
        f"{FAILURES}::test_what_does_not_finish_in_time_is_ended_with_a_row",
        f"{INGRESS}::test_stopping_leaves_nobody_behind",
        "integration/web/test_server.py::test_close_lets_running_requests_end",
        "integration/web/test_server.py::test_who_asked_before_a_drain_is_answered",
    ),
    "pages that answer under load": (
        f"{DOOR}::test_probes_answer_while_long_prompts_are_counted",
        "integration/bus/test_service.py::test_a_running_service",
    ),
    "tokenizing is bounded": (
        "integration/ingress/test_tokenizing.py::test_over_the_bound_is_skipped_at_once",
        "integration/ingress/test_tokenizing.py::test_late_work_is_given_up_and_still_counts_until_it_ends",
        f"{BREAKER}::test_a_process_that_hangs_and_one_that_is_gone",
    ),
}
"""What holds whatever fails, in the page's words."""

ROWS = {**PARTS, **PROMISES}


@pytest.mark.parametrize("row", ROWS)
def test_the_proofs_are_there(row: str) -> None:
    """In their files, under their names."""
    assert row
    for proof in ROWS[row]:
        docstring(proof)


def test_the_page_has_these_rows_and_no_other() -> None:
    """The first cells of both tables, in this order."""
    cells = [line.split("|")[1].strip() for line in PAGE.splitlines() if line.startswith("| ")]
    assert [cell for cell in cells if cell not in ("what fails", "what holds")] == list(ROWS)


def test_every_metric_of_the_page_is_explained() -> None:
    """docs/operations.md has the name, and its own test that it exists."""
    operations = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text()
    names = set(re.findall(r"`(tidegate_\w+)", PAGE))
    assert names
    assert sorted(name for name in names if name not in operations) == []
