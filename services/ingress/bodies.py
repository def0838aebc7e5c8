"""The bodies of the front door's APIs: the few members that routing needs, by type.

What is not a text, a number or a switch stays a view of the body (`services.ingress.members`), but for the lists of
messages and tools in a usual one. Members that change how we serve a request must have the right type.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from services.ingress.body_facts import Told
from services.ingress.members import NULL, UNBUILT, is_few, read_list

ABSENT: Any = msgspec.UNSET
"""In place of a member of `SPLICED` that is not there: as false as ``None``."""


class AgentHints(msgspec.Struct, forbid_unknown_fields=True):
    """What the peer's clients say of a request; an unknown member or another type is an error there too."""

    priority: int | None = None
    strict_priority: int | None = None
    osl: Annotated[int, msgspec.Meta(ge=0)] | None = None
    speculative_prefill: bool | None = None
    latency_sensitivity: float | None = None


class Nvext(msgspec.Struct, forbid_unknown_fields=True):
    """The peer's extension object; an unknown member is an error (spec: identity-and-traces §1.4, §1.6, H22)."""

    greed_sampling: msgspec.Raw = NULL
    use_raw_prompt: msgspec.Raw = NULL
    annotations: msgspec.Raw = NULL
    backend_instance_id: msgspec.Raw = NULL
    token_data: msgspec.Raw = NULL
    max_thinking_tokens: msgspec.Raw = NULL
    cache_salt: msgspec.Raw = NULL
    extra_fields: msgspec.Raw = NULL
    metadata_upload: msgspec.Raw = NULL
    prefill_worker_id: msgspec.Raw = NULL
    decode_worker_id: msgspec.Raw = NULL
    dp_rank: msgspec.Raw = NULL
    prefill_dp_rank: msgspec.Raw = NULL
    agent_hints: AgentHints | None = None
    request_timestamp_ms: msgspec.Raw = NULL
    routing_constraints: msgspec.Raw = NULL
    router: msgspec.Raw = NULL


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Body(Told, kw_only=True):
    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = ABSENT
    n: int | None = None
    best_of: int | None = None
    priority: int | None = ABSENT
    nvext: Nvext | None = ABSENT
    cache_salt: msgspec.Raw = ABSENT
    session_id: msgspec.Raw = ABSENT
    vllm_xargs: msgspec.Raw = ABSENT
    kv_hints: msgspec.Raw = ABSENT


class ChatBody(Body, kw_only=True):
    messages: list[msgspec.Raw]
    return_token_ids: msgspec.Raw = NULL
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    reasoning_effort: msgspec.Raw = NULL
    chat_template_kwargs: msgspec.Raw = NULL
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: msgspec.Raw = NULL
    documents: msgspec.Raw = NULL
    add_special_tokens: msgspec.Raw = NULL
    truncate_prompt_tokens: msgspec.Raw = NULL


class CompletionsBody(Body, kw_only=True):
    prompt: msgspec.Raw = NULL
    prompt_embeds: msgspec.Raw = NULL
    return_token_ids: msgspec.Raw = NULL
    max_tokens: int | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: msgspec.Raw = NULL


class ResponsesBody(Body, kw_only=True):
    input: msgspec.Raw
    instructions: msgspec.Raw = NULL
    reasoning: msgspec.Raw = NULL
    chat_template_kwargs: msgspec.Raw = NULL
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    conversation: msgspec.Raw = NULL


class MessagesBody(Body, kw_only=True):
    messages: list[msgspec.Raw]
    system: msgspec.Raw = NULL
    chat_template_kwargs: msgspec.Raw = NULL
    max_tokens: int | None = None
    thinking: msgspec.Raw = NULL
    output_config: msgspec.Raw = NULL


def decoders_of(kind: type[Body]) -> tuple[msgspec.json.Decoder[Any], msgspec.json.Decoder[Any]]:
    """For usual bodies, and for large ones, of which no list is built."""
    lists: list[Any] = [("tools", msgspec.Raw, NULL)]
    if "messages" in kind.__struct_fields__:
        lists.append(("messages", msgspec.Raw))
    large = msgspec.defstruct(f"Large{kind.__name__}", lists, bases=(kind,), kw_only=True)
    return msgspec.json.Decoder(kind), msgspec.json.Decoder(large)


def build_lists(body: Any) -> bool:
    """Build the lists of a large body that hold few items; whether they all do."""
    body.tools, built = read_list(body.tools, "tools", or_null=True)
    if isinstance(body, ResponsesBody):
        if bytes(memoryview(body.input)[:1]) == b"[" and not is_few(body.input):
            body.input, built = UNBUILT, False
    elif not isinstance(body, CompletionsBody):
        body.messages, messages_built = read_list(body.messages, "messages")
        built = built and messages_built
    return built
