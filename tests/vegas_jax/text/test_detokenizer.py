"""Whatever the tokens: the pieces, joined, are the text of all tokens."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from vegas_jax.checkpoint import resolve
from vegas_jax.text import Detokenizer, Tokenizer, load

BYTE_LEVEL = load(resolve("codelm-16m"))
BROKEN = [i for i in range(BYTE_LEVEL.vocab_size) if "\ufffd" in BYTE_LEVEL.decode([i])]
MULTILINGUAL = "naïve 🙂👩‍👩‍👧 日本語 Ελληνικά العربية 🇩🇪\t\u200d\ufffd\ufffd e\u0301 ▁ \x00"


def sentence_piece(decoder):
    """Words that begin with "▁", single bytes, and a decoder that drops the first space."""
    pieces = ["<s>", "", "▁", "▁▁", "▁a", "▁bc", "d", "e", "\ufffd", "é", "▁🙂"]
    pieces += [f"<0x{i:02X}>" for i in range(256)]
    inner = tokenizers.Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True)
    )
    inner.add_special_tokens(["<s>"])
    inner.decoder = decoder
    return Tokenizer(inner)


LLAMA = sentence_piece(
    decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
)
METASPACE = sentence_piece(decoders.Metaspace("▁", prepend_scheme="always"))
TOKENIZERS = {"byte-level": BYTE_LEVEL, "llama": LLAMA, "metaspace": METASPACE}


def pieces(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.add(i) for i in ids), detokenizer.flush()]


def ids_of(tokenizer):
    ids = st.integers(0, tokenizer.vocab_size + 1)
    return ids | st.sampled_from(BROKEN) if tokenizer is BYTE_LEVEL else ids | st.integers(0, 9)


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@given(data=st.data())
def test_random_tokens(tokenizer, data):
    ids = data.draw(st.lists(ids_of(tokenizer), max_size=60))
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@given(text=st.text() | st.text(st.sampled_from(MULTILINGUAL)))
def test_any_text(text):
    assert "".join(pieces(BYTE_LEVEL, BYTE_LEVEL.encode(text))) == text


@given(ids=st.lists(st.sampled_from(BROKEN), min_size=40, max_size=120))
def test_long_runs_of_broken_characters(ids):
    assert "".join(pieces(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids)


@pytest.mark.parametrize("tokenizer", [LLAMA, METASPACE], ids=["llama", "metaspace"])
def test_spaces_survive_a_long_run_of_broken_characters(tokenizer):
    names = ["▁a", *["<0xF0>"] * 4, "▁a", *["\ufffd"] * 20, "▁a", "▁a", "", "▁a"]
    names += ["<0x41>", "", "▁a"]
    ids = [tokenizer._tokenizer.token_to_id(name) for name in names]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_character_comes_whole_and_at_once():
    ids = BYTE_LEVEL.encode("🙂")
    assert len(ids) == 3
    assert pieces(BYTE_LEVEL, ids) == ["", "", "🙂", ""]


def test_text_is_not_held_back():
    ids = BYTE_LEVEL.encode("def f(x):\n    return x + 1\n")
    assert pieces(BYTE_LEVEL, ids) == [*(BYTE_LEVEL.decode([i]) for i in ids), ""]


def test_flush_spells_an_unfinished_character_and_starts_anew():
    first, second, third = BYTE_LEVEL.encode("🙂")
    detokenizer = Detokenizer(BYTE_LEVEL)
    assert detokenizer.add(first) + detokenizer.add(second) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""
    assert [detokenizer.add(i) for i in (first, second, third)] == ["", "", "🙂"]


def test_bytes_wait_for_the_end_of_their_run():
    """One bad byte turns the whole run into U+FFFD, so that no character before it is safe."""
    a, byte, bad = (LLAMA._tokenizer.token_to_id(t) for t in ("▁a", "<0x41>", "<0xFF>"))
    assert pieces(LLAMA, [a, byte, a]) == ["a", "", "A a", ""]
    assert pieces(LLAMA, [a, byte, bad, a]) == ["a", "", "", "\ufffd\ufffd a", ""]
    assert pieces(LLAMA, [a, byte]) == ["a", "", "A"]


class Counting(Tokenizer):
    """Counts the tokens that it decodes."""

    decoded = 0

    def decode(self, ids):
        self.decoded += len(ids)
        return super().decode(ids)


@pytest.mark.parametrize("run", ["text", "broken", "mixed", "special", "bytes", "spaces"])
def test_time_is_linear(run):
    first, second, _ = BYTE_LEVEL.encode("🙂")
    tokenizer, ids = {
        "text": (BYTE_LEVEL, BYTE_LEVEL.encode("return x ") * 100),
        "broken": (BYTE_LEVEL, [first, second] * 200),
        "mixed": (BYTE_LEVEL, ([first] * 20 + BYTE_LEVEL.encode("a b")) * 20),
        "special": (BYTE_LEVEL, [first, *[0] * 400]),
        "spaces": (LLAMA, [LLAMA._tokenizer.token_to_id("▁")] * 400),
        "bytes": (LLAMA, [LLAMA._tokenizer.token_to_id("<0x41>")] * 400),
    }[run]
    counting = Counting(tokenizer._tokenizer)
    assert "".join(pieces(counting, ids)) == tokenizer.decode(ids)
    assert counting.decoded <= 20 * len(ids)
