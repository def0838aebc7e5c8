"""What a master says over HTTP: pages as 0.3.14 writes them, and pages that cannot be."""

from __future__ import annotations

import pytest

from services.bridge.errors import ScrapeError
from services.bridge.pool.report import MasterMetrics, parse_master_metrics, parse_segments, parse_status

STATUS = b'{"enabled":true,"published_batches":23,"published_events":426,"dropped_events":3,"skipped_keyless_events":0}'

SEGMENTS = (
    b'{"total_segments":1,"segments":[{"segment_name":"127.0.0.1:36101","segment_id":"1774-7109",'
    b'"client_id":"7656-26",'
    b'"base_address":"0x7f704f000000","size_bytes":16777216,"size_human":"0.015625 GiB",'
    b'"te_endpoint":"127.0.0.1:15449","protocol":"tcp","status":"OK","allocator_used_bytes":400,"allocator_capacity_bytes":16777216}]}'
)

METRICS = """\
# HELP master_evicted_key_count_mem Total number of keys evicted in mem
# TYPE master_evicted_key_count_mem counter
master_evicted_key_count_mem 181
master_evicted_key_count 190
master_key_count 18
master_client_liveness_suspected_clients 1
master_client_liveness_suspected_transitions_total 2
master_value_size_bytes_bucket{le="4096.000000"} 1
mooncake_tenant_quota_charged_bytes{tenant_id="default"} 200
mooncake_tenant_quota_charged_bytes{tenant_id="team \\"b\\""} 17
mooncake_tenant_quota_charged_bytes{tenant_id="idle"} 0
"""


def test_status_names_the_newest_message() -> None:
    """Each dropped event skips a number (spec: pool-events §1), so messages and dropped events make the newest one."""
    status = parse_status(STATUS)
    assert (status.enabled, status.newest_seq) == (True, 26)


@pytest.mark.parametrize("told", ["", ',"published_batches":9', ',"published_batches":9,"dropped_events":-1'])
def test_a_status_without_its_counters_names_none(told: str) -> None:
    """A number that is too small would be a master that has restarted."""
    status = parse_status(f'{{"enabled":true{told}}}'.encode())
    assert (status.enabled, status.newest_seq) == (True, None)


def test_a_status_that_does_not_say_enabled_is_off() -> None:
    """Mooncake #4039: only ``enabled: true`` is believed."""
    assert not parse_status(b'{"enabled":"true","published_batches":-1}').enabled
    assert not parse_status(b"{}").enabled


def test_segments_are_told_apart_by_client_and_status() -> None:
    """A client that comes back under the same name has another segment id."""
    assert parse_segments(SEGMENTS) == {("1774-7109", "7656-26", "OK")}
    assert parse_segments(b'{"total_segments":0,"segments":[]}') == frozenset()


def test_too_many_segments_are_watched_by_their_number() -> None:
    """What a master sends does not grow memory without bound."""
    many = b'{"segments":[' + b",".join([b'{"segment_id":"s"}'] * 65_537) + b"]}"
    assert parse_segments(many) == {("65537", "", "")}


def test_metrics_are_the_few_that_are_read() -> None:
    """Silent evictions, the lives of clients, and which tenants store something."""
    assert parse_master_metrics(METRICS) == MasterMetrics(
        evicted=181,
        liveness=(
            ("master_client_liveness_suspected_clients", 1),
            ("master_client_liveness_suspected_transitions_total", 2),
        ),
        tenants=("default", 'team \\"b\\"'),
    )


@pytest.mark.parametrize("value", ["", "x", "nan", "inf", "-1", "1e300"])
def test_numbers_that_cannot_be_are_left_out(value: str) -> None:
    """A page of a master that is going down, or of something else."""
    assert parse_master_metrics(f"master_evicted_key_count_mem {value}\n") == MasterMetrics()


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b'{"segments":{}}', b"[" * 100_000])
def test_pages_that_are_none_are_the_masters_fault(body: bytes) -> None:
    """And end nothing: the look has failed."""
    with pytest.raises(ScrapeError):
        parse_segments(body)
