import numpy as np
import pytest
import tokenizers
from tokenizers import models, processors

from vegas_jax.checkpoint import resolve
from vegas_jax.errors import CheckpointError, InputError
from vegas_jax.text import Tokenizer, load

TEXT = 'def f(x):\n    return f"{x}: naïve 🙂 日本語"\n'


@pytest.fixture(scope="module")
def shipped():
    return load(resolve("codelm-16m"))


def test_round_trip(shipped):
    ids = shipped.encode(TEXT)
    assert all(type(i) is int and 0 <= i < shipped.vocab_size for i in ids)
    assert shipped.decode(ids) == TEXT
    assert shipped.decode(np.array(ids, np.int32)) == TEXT
    assert shipped.vocab_size == 8192


def test_the_shipped_tokenizer_adds_nothing(shipped):
    assert shipped.encode("") == []
    assert shipped.decode([]) == ""


def test_special_tokens_are_read_and_not_written(shipped):
    ids = shipped.encode("a<|endoftext|>b")
    assert 0 in ids
    assert shipped.decode(ids) == "ab"
    assert shipped.is_silent(0)
    assert shipped.is_silent(shipped.vocab_size)  # the model's vocabulary may be padded
    assert not shipped.is_silent(ids[0])


def test_lone_surrogates_are_refused(shipped):
    with pytest.raises(InputError, match="surrogate at character 1"):
        shipped.encode("a\udce9")


def test_the_post_processor_is_followed():
    inner = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "a": 1}, unk_token="<s>"))
    inner.add_special_tokens(["<s>"])
    inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = Tokenizer(inner)
    assert tokenizer.encode("a") == [0, 1]
    assert tokenizer.encode("<s>a", add_special_tokens=False) == [0, 1]
    assert tokenizer.encode("") == [0]


def test_truncation_and_padding_are_off(shipped, tmp_path):
    inner = tokenizers.Tokenizer.from_file(str(resolve("codelm-16m") / "tokenizer.json"))
    inner.enable_truncation(3)
    inner.enable_padding(length=64)
    inner.save(str(tmp_path / "tokenizer.json"))
    assert load(tmp_path).encode(TEXT) == shipped.encode(TEXT)


def test_none_without_a_file(tmp_path):
    assert load(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", "{}", '{"version": "1.0", "model": null}'])
def test_a_corrupt_file_is_named(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load(tmp_path)
