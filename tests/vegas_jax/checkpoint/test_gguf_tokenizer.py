"""Tokenizers out of GGUF metadata, against those that the metadata was made from."""

import json
from pathlib import Path

import pytest
import tokenizers

from tests.vegas_jax.checkpoint.gguf_files import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    VOCABULARY,
    refused,
    write,
)
from vegas_jax.checkpoint import resolve
from vegas_jax.checkpoint.gguf import open_gguf
from vegas_jax.text.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "def f(x):\n    return x ** 2  # it's 12345\r\n\r\n\n\t\ty\n",
    "na\u00efve e\u0301 \u65e5\u672c\u8a9e \U0001f600 \u0e44\u0e17\u0e22 'LL I'm they'RE",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><|im_start",
    Path(__file__).read_text(encoding="utf-8"),
]
ALPHABET = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


@pytest.fixture
def shipped():
    return resolve("codelm-16m") / "tokenizer.json"


def vocabulary_of(tokenizer, **keys):
    """What llama.cpp's conversion keeps of a byte-level tokenizer.json, then three that pad it."""
    raw = json.loads(tokenizer.to_str())
    ids = raw["model"]["vocab"] | {token["content"]: token["id"] for token in raw["added_tokens"]}
    texts = sorted(ids, key=ids.get)
    assert [ids[text] for text in texts] == list(range(len(texts)))
    special = {token["content"]: token["special"] for token in raw["added_tokens"]}
    kinds = {True: CONTROL, False: USER_DEFINED, None: NORMAL}
    return {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": texts + [f"[PAD{i}]" for i in range(3)],
        "token_type": [kinds[special.get(text)] for text in texts] + [UNUSED] * 3,
        "merges": [" ".join(merge) for merge in raw["model"]["merges"]],
    } | keys


def opened(path, vocabulary, **keys):
    return open_gguf(write(path, vocabulary=vocabulary, **keys)).tokenizer


def assert_same(read, original, texts=TEXTS):
    for text in texts:
        ids = original.encode(text).ids
        assert read.encode(text).ids == ids
        for skip in (True, False):
            assert read.decode(ids, skip_special_tokens=skip) == original.decode(
                ids, skip_special_tokens=skip
            )
    assert read.get_vocab() == original.get_vocab()


def test_shipped_tokenizer(path, shipped):
    original = tokenizers.Tokenizer.from_file(str(shipped))
    vocabulary = vocabulary_of(original, eos_token_id=2)
    original.normalizer = tokenizers.normalizers.NFC()  # Qwen's has one, the shipped one has not
    read = opened(path, vocabulary)
    assert_same(read, original)
    assert Tokenizer(read).is_silent(1)
    assert not Tokenizer(read).is_silent(100)


def test_user_defined_tokens_are_whole_and_shown(path, shipped):
    original = tokenizers.Tokenizer.from_file(str(shipped))
    original.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    read = opened(path, vocabulary_of(original))
    texts = ["a<think> b", "<think><|im_end|>"]
    assert_same(read, original, texts)
    assert read.decode(read.encode(texts[1]).ids) == "<think>"


@pytest.mark.parametrize(
    ("bos", "eos", "expected"),
    [(True, False, [4, 2]), (False, True, [2, 5]), (True, True, [4, 2, 5]), (None, None, [2])],
)
def test_bos_and_eos(path, bos, eos, expected):
    keys = {"add_bos_token": bos, "add_eos_token": eos}
    read = opened(path, VOCABULARY | keys)
    assert read.encode("ab").ids == expected
    assert read.encode("ab", add_special_tokens=False).ids == [2]
    assert read.decode(expected) == "ab"


@pytest.mark.parametrize(("pre", "adds"), [("llama-bpe", True), ("qwen2", False)])
def test_llama_3_adds_bos_unless_told(path, pre, adds):
    read = opened(path, VOCABULARY | {"pre": pre})
    assert read.encode("ab").ids == [4, 2] if adds else [2]
    read = opened(path, VOCABULARY | {"pre": pre, "add_bos_token": False})
    assert read.encode("ab").ids == [2]


def test_llama_3_takes_whole_words_without_merging(path):
    vocabulary = VOCABULARY | {"merges": ["b c"], "tokens": ["a", "b", "abc", "c", "bc", *"def"]}
    vocabulary |= {"token_type": [NORMAL] * 8, "bos_token_id": None}
    assert opened(path, vocabulary | {"pre": "llama-bpe"}).encode("abc").ids == [2]
    assert opened(path, vocabulary | {"pre": "qwen2"}).encode("abc").ids == [0, 4]


CUTS = {
    "qwen2": "it|'S| HelloWorld|'s| |1|2|3|4|5|,\u0301|a|+=\n\n|  | x|/\n",
    "llama-bpe": "it|'S| HelloWorld|'s| |123|45|,\u0301|a|+=\n\n|  | x|/\n",
    "gpt-4o": "it'S| Hello|World's| |123|45|,\u0301a|+=\n\n|  | x|/\n",
    "tekken": "it|'S| Hello|World|'s| |1|2|3|4|5|,\u0301a|+=\n\n|  | x|/\n",
    "gpt-2": "it|'|S| HelloWorld|'s| 12345|,\u0301|a|+=|\n\n  | x|/|\n",
    "smollm": "it|'|S| HelloWorld|'s| |1|2|3|4|5|,\u0301|a|+=|\n\n  | x|/|\n",
    "default": "it|'|S| HelloWorld|'|s| |123|45|,|\u0301|a|+=|\n\n  | x|/|\n",
}


@pytest.mark.parametrize("pre", CUTS)
def test_how_text_is_cut(path, pre):
    text = CUTS[pre].replace("|", "")
    read = opened(path, VOCABULARY | {"pre": pre})
    spans = [span for _, span in read.pre_tokenizer.pre_tokenize_str(text)]
    assert "|".join(text[start:stop] for start, stop in spans) == CUTS[pre]


def test_sentence_piece(path):
    r"""Merges go by score; characters without a token become bytes, spaces U+2581."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
    pieces = ["ab", "bc", "abc", "\u2581a", "\u2581", "a", "b", "c"]
    scores = [0.0] * len(texts) + [-2.0, -1.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0]
    ids = {piece: len(texts) + i for i, piece in enumerate(pieces)}
    keys = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "scores": scores}
    keys |= {"pre": "default", "merges": None}
    vocabulary = {
        "model": "llama",
        "tokens": texts + pieces,
        "token_type": kinds + [NORMAL] * len(pieces),
    }
    read = opened(path, vocabulary | keys)
    assert read.encode("abc").ids == [1, ids["\u2581"], ids["abc"]]
    assert read.encode("b a").ids == [1, ids["\u2581"], ids["b"], ids["\u2581a"]]
    assert read.encode("\u00e9", add_special_tokens=False).ids == [
        ids["\u2581"],
        3 + 0xC3,
        3 + 0xA9,
    ]
    for text in ("abc", " a  b", "\u65e5a\n", "a "):
        assert read.decode(read.encode(text).ids) == text
    assert read.encode("a</s>").ids == [1, ids["\u2581a"], 2]
    assert Tokenizer(read).is_byte(3)
    without = opened(path, vocabulary | keys | {"add_space_prefix": False})
    assert without.encode("abc", add_special_tokens=False).ids == [ids["abc"]]
    refused(write(path, vocabulary=vocabulary | keys | {"scores": [1.0]}), "tokenizer.ggml.scores")


def test_texts_of_special_tokens_and_template(path):
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    read = open_gguf(write(path, **{"tokenizer.chat_template": template}))
    assert (read.chat_template, read.bos_token, read.eos_token) == (template, "<s>", "</s>")
    read = open_gguf(write(path, vocabulary=VOCABULARY | {"bos_token_id": None}))
    assert (read.chat_template, read.bos_token, read.eos_token) == (None, None, "</s>")


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"pre": "chatglm-bpe"}, ["tokenizer.ggml.pre", "'chatglm-bpe'", "qwen2"]),
        ({"pre": None}, ["tokenizer.ggml.pre", "None"]),
        ({"model": "bert"}, ["tokenizer.ggml.model", "'bert'"]),
        ({"bos_token_id": 8}, ["tokenizer.ggml.bos_token_id", "8"]),
        ({"token_type": [NORMAL]}, ["tokenizer.ggml.token_type", "8 tokens"]),
        ({"tokens": ["a", "b", "ab", *"cdeaf"]}, ["'a' twice"]),
        ({"tokens": [1, 2, 3]}, ["tokenizer.ggml.tokens"]),
        ({"merges": ["a q"]}, ["cannot be built"]),
        ({"merges": ["ab"]}, ["cannot be built"]),
    ],
)
def test_refused(path, keys, parts):
    refused(write(path, vocabulary=VOCABULARY | keys), *parts)
