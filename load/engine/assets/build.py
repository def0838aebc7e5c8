"""Builds ``tokenizer.json`` and ``tokenizer_config.json``: a small byte-level BPE trained on Python's own library.

    python -m load.engine.assets.build

The result is committed; training again may order rare merges differently, which changes every token id.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).parent
VOCABULARY = 6144
CORPUS_FILES = 700
FILE_CHARS = 60_000
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

CHAT_TEMPLATE = """\
{%- if tools -%}
{{- '<|im_start|>system\\n# Tools\\n\\nYou may call functions. Their signatures:\\n<tools>' -}}
{%- for tool in tools -%}
{{- '\\n' + (tool | tojson) -}}
{%- endfor -%}
{{- '\\n</tools>\\n\\nTo call one, answer with <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>' -}}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
{{- '<|im_start|>user' -}}
{%- endif -%}
{{- '\\n<tool_response>\\n' + (message.content or '') + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- else -%}
{%- set text = (message.content or '') -%}
{{- '<|im_start|>' + message.role + '\\n' + text -}}
{%- if message.role == 'assistant' and message.tool_calls -%}
{%- for call in message.tool_calls -%}
{%- set called = call.function if call.function is defined else call -%}
{%- if text or not loop.first -%}
{{- '\\n' -}}
{%- endif -%}
{{- '<tool_call>\\n{"name": "' + called.name + '", "arguments": ' -}}
{%- if called.arguments is string -%}
{{- called.arguments -}}
{%- else -%}
{{- called.arguments | tojson -}}
{%- endif -%}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
"""ChatML: tools first, then every message. What an assistant said stands directly after ``assistant\\n`` and before
``<|im_end|>``, so that the KV of a prompt and its output is a prefix of the next turn's prompt. Content is one text:
whoever renders joins parts with a line break and decodes tool-call arguments first, as vLLM does."""


def corpus() -> Iterator[str]:
    """Text that every machine with Python has: the sources and docstrings of its standard library."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    for path in files[:: max(1, len(files) // CORPUS_FILES)]:
        yield path.read_text(encoding="utf-8", errors="replace")[:FILE_CHARS]


def train() -> Tokenizer:
    """The tokenizer, with special tokens for ChatML and plain added tokens for tool markup."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKUP),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKUP])
    return tokenizer


def main() -> None:
    tokenizer = train()
    (HERE / "tokenizer.json").write_text(tokenizer.to_str(pretty=False) + "\n", encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 131072,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (HERE / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    print(f"{tokenizer.get_vocab_size()} tokens, {(HERE / 'tokenizer.json').stat().st_size} bytes")


if __name__ == "__main__":
    main()
