"""The page of models: a union over workers, in the words of both families of clients."""

from __future__ import annotations

from schemas.worker import WorkerProfile, WorkerState
from services.ingress.models import model_entry, model_list


def worker(name: str, length: int | None, *adapters: str) -> WorkerState:
    profile = WorkerProfile(
        url=f"http://{name}", model="base", models=("base", *adapters), adapters=adapters, max_model_len=length
    )
    return WorkerState(
        at_ms=0, source=name, epoch=1, seq=1, worker=name, incarnation="i", health="ready", profile=profile
    )


def test_a_model_of_several_workers_is_as_long_as_the_shortest() -> None:
    """A prompt must fit wherever it is sent; who does not say how long is not asked."""
    workers = [worker("a", 4096), worker("b", None), worker("c", 2048)]
    assert model_entry("base", workers, 0, "1970-01-01T00:00:00Z") == {
        "id": "base",
        "object": "model",
        "created": 0,
        "owned_by": "tidegate",
        "root": "base",
        "parent": None,
        "type": "model",
        "display_name": "base",
        "created_at": "1970-01-01T00:00:00Z",
        "max_model_len": 2048,
    }
    assert "max_model_len" not in model_entry("base", [worker("b", None)], 0, "")


def test_an_adapter_names_its_model() -> None:
    """As vLLM does."""
    entry = model_entry("lora", [worker("a", 4096, "lora"), worker("b", 4096)], 0, "")
    assert (entry["root"], entry["parent"], entry["max_model_len"]) == ("lora", "base", 4096)


def test_all_are_on_one_page() -> None:
    """Anthropic's clients ask for the next page where there may be one; OpenAI's read `object` and `data`."""
    entries = [model_entry(name, [], 0, "") for name in ("a", "b")]
    page = model_list(entries)
    assert (page["object"], page["data"]) == ("list", entries)
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "a", "b")
    assert (model_list([])["first_id"], model_list([])["last_id"]) == (None, None)
