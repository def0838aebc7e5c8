"""What the bridge reads out of an engine's HTTP answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from schemas.base import from_json, to_json
from schemas.worker import RankLoad
from services.bridge.errors import ScrapeError
from services.bridge.profile import parse_metrics, parse_models, parse_server_info, parse_version

FIXTURES = Path(__file__).parents[2] / "fixtures" / "engine_streams"

VLLM_PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_running{engine="1",model_name="tiny"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting{engine="1",model_name="tiny"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.5
# TYPE vllm:e2e_request_latency_seconds histogram
vllm:e2e_request_latency_seconds_bucket{engine="0",le="0.3"} 7.0
process_start_time_seconds 1.79597318e+09
"""


def test_vllm_page_as_captured() -> None:
    """The captured ``cache_config_info`` of 0.32.0 gives block size and pool size in tokens."""
    report = parse_metrics((FIXTURES / "vllm_0.32.0_cache_config.prom").read_text())
    assert (report.engine, report.block_size, report.kv_tokens) == ("vllm", 32, 2048)


def test_vllm_load_per_rank() -> None:
    """User case A13: the label ``engine`` is the rank; rank 0 is a value."""
    report = parse_metrics(VLLM_PAGE)
    assert report.loads == (
        RankLoad(rank=0, running=3, waiting=2, kv_usage=0.25),
        RankLoad(rank=1, running=1, waiting=0, kv_usage=0.5),
    )
    assert report.started_at == pytest.approx(1795973180.0)
    assert report.block_size is None


def test_block_size_none_is_unknown() -> None:
    """User case A10: ``block_size="None"`` is not a number and not a crash."""
    report = parse_metrics('vllm:cache_config_info{block_size="None",num_gpu_blocks="None"} 1.0\n')
    assert (report.block_size, report.kv_tokens) == (None, None)


def test_sglang_page_takes_the_whole_series() -> None:
    """SGLang splits series by priority; the one with an empty priority is the whole."""
    report = parse_metrics(
        'sglang:num_running_reqs{dp_rank="1",priority="",tp_rank="0"} 4\n'
        'sglang:num_running_reqs{dp_rank="1",priority="5",tp_rank="0"} 3\n'
        'sglang:num_queue_reqs{dp_rank="1",priority="",tp_rank="0"} 2\n'
        'sglang:token_usage{dp_rank="1",priority="",tp_rank="0"} 0.5\n'
        'sglang:page_size{tp_rank="0"} 16\n'
        'sglang:max_total_num_tokens{priority=""} 1024\n'
    )
    assert report.engine == "sglang"
    assert report.loads == (RankLoad(rank=1, running=4, waiting=2, kv_usage=0.5),)
    assert (report.block_size, report.kv_tokens) == (16, 1024)


def test_unknown_engine_has_an_empty_report() -> None:
    """A page without any series of ours says nothing, and that is no error."""
    report = parse_metrics("python_gc_objects_collected_total 5\n")
    assert (report.engine, report.loads, report.started_at) == ("unknown", (), None)


def test_page_that_is_not_prometheus_text() -> None:
    """A broken page is the engine's fault and named so."""
    with pytest.raises(ScrapeError, match="not Prometheus text") as caught:
        parse_metrics('vllm:num_requests_running{engine="0"} many\n')
    assert caught.value.reason == "bad_answer"


def test_models() -> None:
    """The first model is the worker's, its length and owner are read."""
    report = parse_models(
        json.dumps(
            {"data": [{"id": "tiny", "max_model_len": 640, "owned_by": "vllm"}, {"id": "tiny-lora"}, {"id": 7}]}
        ).encode()
    )
    assert (report.model, report.models, report.max_model_len, report.engine) == (
        "tiny",
        ("tiny", "tiny-lora"),
        640,
        "vllm",
    )


def test_adapters_are_the_models_with_a_parent() -> None:
    """A11: a second name of the model is the model; an adapter has the base model as its parent."""
    cards: list[dict[str, object]] = [{"id": "base"}, {"id": "alias", "parent": None}, {"id": "l", "parent": "base"}]
    report = parse_models(json.dumps({"data": cards}).encode())
    assert (report.models, report.adapters) == (("base", "alias", "l"), ("l",))


@pytest.mark.parametrize("body", [b"{}", b'{"data": []}', b'{"data": 5}', b"<html>", b"[]", b"\xff"])
def test_models_that_name_none(body: bytes) -> None:
    """An answer without a model cannot register a worker."""
    with pytest.raises(ScrapeError):
        parse_models(body)


def test_version_and_server_info() -> None:
    """vLLM's version, and SGLang's server info with and without KV events."""
    assert parse_version(b'{"version": "0.32.0"}') == "0.32.0"
    assert parse_version(b"{}") is None
    info = parse_server_info(b'{"version": "0.5.23", "page_size": 64, "dp_size": 2, "kv_events": {"block_size": 16}}')
    assert (info.version, info.block_size, info.ranks, info.kv_tokens) == ("0.5.23", 16, 2, None)
    assert parse_server_info(b'{"page_size": 64}').block_size == 64


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-5", "1e300"])
def test_impossible_gauges_do_no_harm(value: str) -> None:
    """Whatever the page says, what comes out can be said on the bus."""
    page = "\n".join(
        f"{name} {value}"
        for name in (
            'vllm:num_requests_running{engine="0"}',
            'vllm:num_requests_waiting{engine="0"}',
            'vllm:kv_cache_usage_perc{engine="0"}',
            'vllm:num_requests_running{engine="99999999999"}',
            "process_start_time_seconds",
            "sglang:page_size",
            "sglang:max_total_num_tokens",
        )
    )
    report = parse_metrics(page)
    (load,) = report.loads
    assert from_json(to_json(load), RankLoad) == load
    assert report.started_at is None or report.started_at > 0
    assert (report.block_size or 1) > 0
    assert 0 <= (report.kv_tokens or 0) < 1 << 53


def test_impossible_labels_and_names_do_no_harm() -> None:
    """Digits that are none, numbers of thousands of digits, names of a megabyte, nesting deeper than the stack."""
    for number in ("\u00b2", "9" * 5000, "0", "-1", ""):
        labels = f'block_size="{number}",num_gpu_blocks="{number}",kv_cache_size_tokens="{number}"'
        report = parse_metrics(f"vllm:cache_config_info{{{labels}}} 1.0")
        assert report.block_size is None
        assert report.kv_tokens is None
    listed = [{"id": "n" * 1_000_000}, {"id": "tiny", "max_model_len": 10**400}]
    models = parse_models(json.dumps({"data": listed}).encode())
    assert (models.models, models.max_model_len) == (("tiny",), None)
    assert len(parse_version(json.dumps({"version": "v" * 1_000_000}).encode()) or "") <= 1024
    with pytest.raises(ScrapeError):
        parse_models(b'{"a":' + b"[" * 100_000)
