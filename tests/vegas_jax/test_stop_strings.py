"""Stop strings end text, tokens and statistics alike, wherever a round ends."""

import pytest
import tokenizers

from tests import tiny
from tests.vegas_jax.test_generator import check_consistent
from vegas_jax import Generator, Kind, SamplingParams, SpecConfig
from vegas_jax.text import Tokenizer

# Every token is spelled with one, two or three letters, so that most strings span several.
WORDS = [chr(97 + i % 26) * (1 + i % 3) for i in range(tiny.CONFIG.vocab_size)]
WORDS = [word + chr(65 + i // 26) for i, word in enumerate(WORDS)]


def tokenizer() -> Tokenizer:
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=WORDS[0]))
    library.decoder = tokenizers.decoders.Fuse()
    return Tokenizer(library)


def generator(method: str) -> Generator:
    spec = SpecConfig(method=method, sparse_ratio=0.05, sparse_min_tokens=8, acceptance="coupled")
    return Generator(tiny.MODEL, tiny.params(), tokenizer(), spec=spec, max_len=200, batch_size=2)


PROMPTS = tiny.prompts([50, 9, 120], seed=3)
FREE = SamplingParams(max_new_tokens=40, temperature=1.2, logprobs=True)


@pytest.mark.parametrize("method", ["vegas", "plain"])
def test_the_text_is_cut_before_a_stop_string_and_all_else_agrees(method):
    gen = generator(method)
    free = gen.generate(PROMPTS, FREE)
    whole = free[0].text
    assert whole == "".join(WORDS[token] for token in free[0].token_ids)
    kinds_at_the_cut = set()
    for begin in range(0, len(whole) - 6, 11):
        stop = whole[begin : begin + 5]
        sampling = SamplingParams(**{**vars(FREE), "stop": ("never", stop)})
        stopped = gen.generate(PROMPTS, sampling)
        for before, after in zip(free, stopped, strict=True):
            at = before.text.find(stop)
            if at < 0:
                assert after.token_ids == before.token_ids
                assert after.finish_reason == "length"
                continue
            assert after.text == before.text[:at]
            assert after.finish_reason == "stop"
            assert after.token_ids == before.token_ids[: len(after.token_ids)]
            spelled = "".join(WORDS[token] for token in after.token_ids)
            assert stop in spelled
            assert stop not in spelled[: -len(WORDS[after.token_ids[-1]])]
            check_consistent(after, gen.spec.num_drafts)
            kinds_at_the_cut.add(after.kinds[-1])
    if method == "vegas":
        assert Kind.ACCEPTED in kinds_at_the_cut


def test_streamed_text_never_shows_what_a_stop_string_takes_back():
    gen = generator("vegas")
    (free,) = gen.generate(PROMPTS[:1], FREE)
    for begin in (3, 10, 24, 41):
        stop = free.text[begin : begin + 6]
        deltas = list(gen.stream(PROMPTS[0], SamplingParams(**{**vars(FREE), "stop": (stop,)})))
        shown = "".join(delta.text for delta in deltas)
        final = deltas[-1].completion
        assert shown == final.text == free.text[: free.text.index(stop)]
        assert sum((d.token_ids for d in deltas), ()) == final.token_ids
        assert all("".join(t for t, _ in d.segments) == d.text for d in deltas)
