"""Channels token by token against the definition, written out over whole replies."""

import types

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from tests import tiny
from vegas_jax import Generator, InputError, SamplingParams, SpecConfig
from vegas_jax.checkpoint import resolve
from vegas_jax.progress import Job, Progress
from vegas_jax.text import ChannelDetokenizer, Detokenizer, Tokenizer, has_channels, load
from vegas_jax.text.channels import make_detokenizer

MARKERS = ["start", "end", "return", "call", "channel", "constrain", "message"]
MARKERS = [f"<|{name}|>" for name in MARKERS]


def with_markers() -> Tokenizer:
    path = resolve("codelm-16m") / "tokenizer.json"
    inner = tokenizers.Tokenizer.from_file(str(path))
    inner.add_special_tokens(MARKERS)
    return Tokenizer(inner)


TOKENIZER = with_markers()
IDS = {marker: TOKENIZER.special_token(marker) for marker in MARKERS}
REPLY = (
    "<|channel|>analysis<|message|>They greet 🙂.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Hello 日本!\nBye<|return|>"
)


def shown(ids, show):
    detokenizer, pieces = ChannelDetokenizer(TOKENIZER, show), []
    for token in ids:
        pieces.append(detokenizer.add(token))
        pieces.append(detokenizer.heading)
    pieces.append(detokenizer.flush())
    assert detokenizer.heading == ""
    return pieces


def by_definition(ids, show):
    """Cuts the reply at its markers, then joins the texts that are to be shown."""
    names = {token: marker for marker, token in IDS.items()}
    parts = [(None, [])]
    for token in ids:
        if token in names:
            parts.append((names[token], []))
        else:
            parts[-1][1].append(token)
    text, header, part, visible = "", "", "text", True
    for marker, tokens in parts:
        if marker == "<|message|>":
            name = (header.split() or [""])[0]
            part, visible = "text", show == "all" or name in ("", "final")
            if visible:
                text += "\n\n" if text else ""
                text += f"{name}:\n" if name and show == "all" else ""
        elif marker == "<|constrain|>":
            header += " "
        elif marker is not None:
            part = {"<|start|>": "role", "<|channel|>": "channel"}.get(marker, "text")
            header, visible = "", True
        decoded = TOKENIZER.decode(tokens)
        header += decoded if part == "channel" else ""
        text += decoded if part == "text" and visible else ""
    return text


@pytest.mark.parametrize(
    ("reply", "final", "everything"),
    [
        (REPLY, "Hello 日本!\nBye", "analysis:\nThey greet 🙂.\n\nfinal:\nHello 日本!\nBye"),
        ("no channels", "no channels", "no channels"),
        ("<|channel|>anal", "", ""),  # cut in the middle of a header
        ("<|channel|>analysis<|message|>Hm", "", "analysis:\nHm"),
        ("<|start|>assistant<|message|>a", "a", "a"),
        ("a<|end|><|start|>assistant", "a", "a"),
        ("a<|end|><|start|>assistant<|message|>b", "a\n\nb", "a\n\nb"),
        (
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
            "",
            "commentary:\n{}",
        ),
        ("<|channel|>commentary<|constrain|>json<|message|>{}<|call|>", "", "commentary:\n{}"),
        (
            "<|channel|>final<|message|>a<|end|><|channel|>final<|message|>b",
            "a\n\nb",
            "final:\na\n\nfinal:\nb",
        ),
        ("<|channel|>final<|message|><|return|>", "", "final:\n"),
    ],
)
def test_examples(reply, final, everything):
    ids = TOKENIZER.encode(reply)
    for show, text in (("final", final), ("all", everything)):
        assert "".join(shown(ids, show)) == text
        assert by_definition(ids, show) == text


TOKENS = (
    st.sampled_from(list(IDS.values()))
    | st.integers(0, TOKENIZER.vocab_size + 1)
    | st.sampled_from(TOKENIZER.encode("final analysis 🙂日"))
)


@given(ids=st.lists(TOKENS, max_size=40), show=st.sampled_from(["final", "all"]))
def test_any_tokens(ids, show):
    assert "".join(shown(ids, show)) == by_definition(ids, show)


@given(texts=st.lists(st.text("🙂日é a\n", max_size=6), min_size=1, max_size=4))
def test_no_character_is_split(texts):
    reply = "".join(f"<|channel|>final<|message|>{text}<|end|>" for text in texts)
    pieces = shown(TOKENIZER.encode(reply), "final")
    assert not any("\ufffd" in piece for piece in pieces)


def test_text_is_not_held_back():
    header = TOKENIZER.encode("<|channel|>final<|message|>")
    text = TOKENIZER.encode("a b🙂")
    pieces = shown(header + text, "all")
    assert pieces[: 2 * len(header)] == [""] * (2 * len(header) - 1) + ["final:\n"]
    words = [TOKENIZER.decode([i]) for i in text[:2]]
    assert pieces[2 * len(header) : -1 : 2] == [*words, "", "", "🙂"]


def test_flush_starts_anew():
    detokenizer = ChannelDetokenizer(TOKENIZER, "all")
    for _ in range(2):
        text = ""
        for token in TOKENIZER.encode("<|channel|>analysis<|message|>a"):
            text += detokenizer.add(token) + detokenizer.heading
        assert text + detokenizer.flush() == "analysis:\na"
    for token in TOKENIZER.encode("<|channel|>ana"):
        detokenizer.add(token)
    detokenizer.flush()
    assert detokenizer.add(TOKENIZER.encode("b")[0]) == "b"


def test_other_tokenizers_have_no_channels():
    plain = load(resolve("codelm-16m"))
    assert has_channels(TOKENIZER)
    assert not has_channels(plain)
    assert type(make_detokenizer(plain, "final")) is Detokenizer
    assert type(make_detokenizer(TOKENIZER, None)) is Detokenizer
    assert type(make_detokenizer(TOKENIZER, "final")) is ChannelDetokenizer


# --- in a run


def progress(reply, channels, stop=()):
    ids = TOKENIZER.encode(reply)
    sampling = SamplingParams(max_new_tokens=len(ids), stop=stop)
    follower = Progress(
        Job(0, (1,), len(ids), 0), sampling, 0, TOKENIZER, frozenset(), 0.0, channels
    )
    tokens = np.array([ids])
    for count in range(1, len(ids) + 1):
        if follower.finished:
            break
        requests = types.SimpleNamespace(emitted=[count], tokens=tokens, kinds=tokens * 0)
        follower.update(requests, 0, 0.0)
    return follower.completion()


def test_stop_strings_are_looked_for_in_what_is_shown():
    assert progress(REPLY, None).text == "analysisThey greet 🙂.assistantfinalHello 日本!\nBye"
    assert progress(REPLY, "final").text == "Hello 日本!\nBye"
    completion = progress(REPLY, "final", stop=("greet", "\nB"))
    assert (completion.text, completion.finish_reason) == ("Hello 日本!", "stop")
    assert progress(REPLY, "all", stop=("greet",)).text == "analysis:\nThey "


def test_stop_strings_are_not_looked_for_in_headings_or_across_them():
    stops = ("\n\n", "analysis", "final:", ".\n", "\nHello", ".Hello")
    assert progress(REPLY, "all", stops).text == progress(REPLY, "all").text


def test_the_generator_shows_channels():
    """Two tokens that the model emits are called <|channel|> and <|message|>."""
    prompt = tiny.prompts([20])[0]
    sampling = SamplingParams(max_new_tokens=12, temperature=1.2)
    settings = {"spec": SpecConfig(method="plain"), "max_len": 64, "batch_size": 1}
    (free,) = Generator(tiny.MODEL, tiny.params(), **settings).generate([prompt], sampling)
    _, channel, name, message, *_ = dict.fromkeys(free.token_ids)
    names = {channel: "<|channel|>", message: "<|message|>"}
    vocabulary = {names.get(i, f"w{i}."): i for i in range(tiny.CONFIG.vocab_size)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0."))
    inner.decoder = tokenizers.decoders.Fuse()
    inner.add_special_tokens(list(names.values()))
    tokenizer = Tokenizer(inner)
    texts = set()
    for channels in (None, "final", "all"):
        generator = Generator(tiny.MODEL, tiny.params(), tokenizer, channels=channels, **settings)
        (completion,) = generator.generate([prompt], sampling)
        assert completion.token_ids == free.token_ids
        streamed = "".join(delta.text for delta in generator.stream(prompt, sampling))
        assert streamed == completion.text
        texts.add(completion.text)
        assert (f"w{name}.:\n" in completion.text) is (channels == "all")
    assert len(texts) == 3


def test_unknown_channels():
    with pytest.raises(InputError, match="channels is 'some', but must be final, all or None"):
        Generator(tiny.MODEL, tiny.params(), channels="some")
