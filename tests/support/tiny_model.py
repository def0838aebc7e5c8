"""A tiny random Llama with its own tokenizer, in a few seconds and without a network.

Run by the interpreter that has torch, tokenizers and transformers (a real engine's):
``python tests/support/tiny_model.py DIRECTORY``. It imports nothing of ours, and those three only when it runs.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

VOCABULARY = 1024
MAX_POSITIONS = 4096
SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}<|system|>You may call: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|end|>{% endif %}
{%- for message in messages %}<|{{ message['role'] }}|>{{ message['content'] or '' }}
{%- for call in message['tool_calls'] or [] %}
calls {{ call['function']['name'] }} with {{ call['function']['arguments'] | tojson }}
{%- endfor %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
"""With tools, tool calls, and the white space control that real templates have."""


def corpus() -> Iterator[str]:
    """Text to learn byte pairs from: what every Python has."""
    for path in sorted(Path(os.__file__).parent.glob("*.py"))[:40]:
        yield path.read_text(encoding="utf-8", errors="ignore")


def build(directory: Path) -> None:
    """Writes tokenizer, chat template and weights in Hugging Face's layout."""
    torch = importlib.import_module("torch")
    tokenizers = importlib.import_module("tokenizers")
    transformers = importlib.import_module("transformers")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=byte_level.alphabet()
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(directory)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(wrapped),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
