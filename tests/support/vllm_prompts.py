"""Prompts as vLLM's own code makes them of requests, without a server and without a model.

Run by an interpreter that has vLLM: ``python tests/support/vllm_prompts.py DIRECTORY``. DIRECTORY has
``templates.json`` (name to chat template) and ``requests.jsonl`` (``{"endpoint", "template", "body"}``);
``prompts.jsonl`` is written there, a line for each request: ``{"text"}``, or ``{"error"}`` where vLLM refuses it.
It imports nothing of ours.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

BOS, EOS = "<|bos|>", "<|eos|>"


class Reference:
    """vLLM's way from a request to a prompt's text: its request classes, its translations, its renderer."""

    def __init__(self) -> None:
        load = importlib.import_module
        entry = "vllm.entrypoints.openai"
        self._chat_request = load(f"{entry}.chat_completion.protocol").ChatCompletionRequest
        self._responses_request = load(f"{entry}.responses.protocol").ResponsesRequest
        self._responses = load(f"{entry}.responses.utils")
        self._messages_request = load("vllm.entrypoints.anthropic.protocol").AnthropicMessagesRequest
        self._messages = load("vllm.entrypoints.anthropic.serving").AnthropicServingMessages
        self._parse = load("vllm.renderers.chat_utils").parse_chat_messages
        self._renderer = load("vllm.renderers.hf")
        tokenizers, transformers = load("tokenizers"), load("transformers")
        plain = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0}, unk_token="x"))
        self._tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, bos_token=BOS, eos_token=EOS)
        self._model = SimpleNamespace(
            multimodal_config=None,
            enable_prompt_embeds=False,
            is_multimodal_model=False,
            trust_remote_code=False,
            revision=None,
            code_revision=None,
            hf_config=SimpleNamespace(model_type="llama"),
        )

    def text(self, endpoint: str, body: dict[str, Any], template: str) -> str:
        """The prompt's text. Raises whatever vLLM answers with 400."""
        if endpoint == "responses":
            request = self._responses_request(**body)
            tools = self._responses.construct_tool_dicts(request.tools, request.tool_choice)
            messages = self._responses.construct_input_messages(
                request_instructions=request.instructions, request_input=request.input
            )
        else:
            request = self._chat_request(**body) if endpoint == "chat_completions" else self._as_chat(body, template)
            tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
            messages = request.messages
        parameters = request.build_chat_params(template, "auto").with_defaults({"tools": tools, "tokenize": False})
        form = self._renderer.resolve_chat_template_content_format(
            template, tools, "auto", self._tokenizer, model_config=self._model
        )
        conversation, _, _ = self._parse(messages, self._model, form)
        given = parameters.get_apply_chat_template_kwargs()
        return str(self._renderer.safe_apply_chat_template(self._model, self._tokenizer, conversation, **given))

    def _as_chat(self, body: dict[str, Any], template: str) -> Any:
        request = self._messages_request(**body)
        return self._messages.to_chat_completion_request(
            request,
            merge_inline_system=self._messages._detect_merge_inline_system(template),
        )


def main(directory: Path) -> None:
    """Read the requests, write their prompts."""
    reference = Reference()
    templates = json.loads((directory / "templates.json").read_text(encoding="utf-8"))
    lines = (directory / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    with (directory / "prompts.jsonl").open("w", encoding="utf-8") as out:
        for line in lines:
            case = json.loads(line)
            try:
                said = {"text": reference.text(case["endpoint"], case["body"], templates[case["template"]])}
            except Exception as error:  # noqa: BLE001 - whatever it raises is a refusal, and its words are the result
                said = {"error": f"{type(error).__name__}: {error}"[:300]}
            out.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, which has a vllm.py of ours
    main(Path(sys.argv[1]))
