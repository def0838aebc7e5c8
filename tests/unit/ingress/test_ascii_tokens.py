"""ASCII by the quicker encoder: the same ids as the tokenizer's own, or not at all."""

from __future__ import annotations

import copy
import json
import string
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from services.ingress.shell.ascii_tokens import LONGEST, AsciiEncoder, UnsuitableError
from services.ingress.shell.local_tokenizer import LocalTokenizer

ASSETS = Path(__file__).parents[3] / "load" / "engine" / "assets"
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
Change = Callable[[dict[str, Any]], object]


@cache
def simulated() -> dict[str, Any]:
    """The simulated engine's tokenizer: GPT-2's way."""
    definition: dict[str, Any] = json.loads((ASSETS / "tokenizer.json").read_bytes())
    return definition


@cache
def trained() -> dict[str, Any]:
    """A small tokenizer in Qwen's way."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1_500, initial_alphabet=alphabet, show_progress=False)
    texts = [path.read_text("utf-8") for path in Path(__file__).parent.glob("test_c*.py")]
    tokenizer.train_from_iterator(texts, trainer)
    added = [AddedToken("<|im_start|>", normalized=False, special=True), AddedToken("<think>", normalized=False)]
    tokenizer.add_tokens([*added, AddedToken("<|im_start|>x", normalized=False)])
    definition: dict[str, Any] = json.loads(tokenizer.to_str())
    return definition


def ids_of(definition: dict[str, Any]) -> Callable[[str], list[int]]:
    tokenizer = Tokenizer.from_str(json.dumps(definition))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


@cache
def both(name: str) -> tuple[AsciiEncoder, Callable[[str], list[int]]]:
    definition = {"simulated": simulated, "trained": trained}[name]()
    return AsciiEncoder(definition, ids_of(definition)), ids_of(definition)


pieces = st.one_of(
    st.text(st.characters(codec="ascii"), max_size=40),
    st.sampled_from([*string.whitespace, "  ", "\r\n", "'ll", "I'M", "123456", "def f(self) -> None:\n    return 1"]),
    st.sampled_from(["<|im_start|>", "<|im_start|>x", "<|im_end|>", "<think>", "<|im_start", "<thin"]),
)


@pytest.mark.long
@pytest.mark.parametrize("name", ["simulated", "trained"])
@given(st.lists(pieces, max_size=30).map("".join))
def test_the_ids_are_the_tokenizers(name: str, text: str) -> None:
    encoder, ids = both(name)
    assert encoder.encode(text).tolist() == ids(text)


@pytest.mark.long
@pytest.mark.parametrize("name", ["simulated", "trained"])
@pytest.mark.parametrize("unit", ["a", " ", "\n", " \n", "!", "1", "ab ", "<think>", "'s"])
def test_the_longest_text_is_no_trouble(name: str, unit: str) -> None:
    """Runs on which regular expressions with a bound on their steps would give up."""
    encoder, ids = both(name)
    text = (unit * LONGEST)[:LONGEST]
    assert encoder.encode(text).tolist() == ids(text)


def swap_two_tokens(definition: dict[str, Any]) -> None:
    vocabulary, (first, second, *_) = definition["model"]["vocab"], definition["model"]["merges"]
    one, other = "".join(first), "".join(second)
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]


CHANGES: dict[str, Change] = {
    "space is put before": lambda of: of["pre_tokenizer"].update(add_prefix_space=True),
    "another normalizer": lambda of: of.update(normalizer={"type": "Lowercase"}),
    "another kind of model": lambda of: of["model"].update(type="WordPiece"),
    "merges are left out": lambda of: of["model"].update(dropout=0.1),
    "tokens that strip": lambda of: of["added_tokens"][0].update(rstrip=True),
    "tokens matched after normalisation": lambda of: of["added_tokens"][0].update(normalized=True),
    "another order": swap_two_tokens,
    "two ways to one token": lambda of: of["model"]["merges"].append(of["model"]["merges"][0]),
    "a token that no merge makes": lambda of: (of["model"].update(ignore_merges=True), of["model"]["merges"].pop()),
    "a byte without a token": lambda of: of["model"]["vocab"].pop("!"),
}


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_may_differ_is_not_taken(change: Change) -> None:
    definition = copy.deepcopy(simulated())
    change(definition)
    with pytest.raises(UnsuitableError):
        AsciiEncoder(definition, ids_of(simulated()))


def test_another_regular_expression_is_not_taken() -> None:
    """Only those are that are known not to give up in a long text."""
    definition = copy.deepcopy(trained())
    definition["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\s+|\S+"
    with pytest.raises(UnsuitableError):
        AsciiEncoder(definition, ids_of(definition))


def test_a_token_that_its_bytes_are_not_merged_to_is_not_taken() -> None:
    """``abc`` of ``ab`` and ``c``, but ``bc`` is merged first: the tokenizer says a, bc; the other would say abc."""
    definition = copy.deepcopy(trained())
    model, added = definition["model"], definition["added_tokens"]
    singles = pre_tokenizers.ByteLevel.alphabet()
    model["vocab"] = {character: number for number, character in enumerate(sorted(singles))}
    model["merges"] = [["b", "c"], ["a", "b"], ["ab", "c"]]
    model["vocab"] |= {"bc": 256, "ab": 257, "abc": 258}
    for number, token in enumerate(added):
        token["id"] = 259 + number
    assert len(ids_of(definition)("abc")) == 2
    with pytest.raises(UnsuitableError):
        AsciiEncoder(definition, ids_of(definition))


@pytest.mark.long
def test_each_text_goes_its_way_and_keeps_its_place() -> None:
    tokenizer = LocalTokenizer(ASSETS, cache_bytes=1 << 20)
    texts = ["plain", "grün", "", "x" * (LONGEST + 1), "last <|im_end|>", "中文"]
    assert [ids.tolist() for ids in tokenizer._encode(texts)] == [ids_of(simulated())(text) for text in texts]
    tokenizer.close()
