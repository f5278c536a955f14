"""A fake engine: a tokenizer of characters, and a generator that answers without a model."""

import dataclasses
import io
import sys
import types

import pytest

import vegas_jax
from vegas_jax.completion import Completion, Delta, Kind, Stats
from vegas_jax.errors import InputError


@dataclasses.dataclass
class FakeEngine:
    """What the fakes were asked, and how they are to behave."""

    loads: list = dataclasses.field(default_factory=list)
    generators: list = dataclasses.field(default_factory=list)
    runs: list = dataclasses.field(default_factory=list)
    warmups: list = dataclasses.field(default_factory=list)
    tokenizer: object = "characters"
    load_error: Exception | None = None
    fail_after: int | None = None  # completions (or deltas) before `error` is raised
    error: BaseException | None = None
    reverse: bool = False  # finish the last prompt first
    answer: str = "".join(chr(ord("a") + i) for i in range(26))
    plain_answer: str | None = None
    channels: str | None = None  # what the last generator was to show

    def complete(self, ids, sampling, index, spec) -> Completion:
        seed = sampling.seed[index] if isinstance(sampling.seed, tuple) else sampling.seed
        plain = spec.method == "plain"
        answer = self.plain_answer if plain and self.plain_answer is not None else self.answer
        text = f"<{seed}>{answer}"[: sampling.max_new_tokens]
        tokens = tuple(map(ord, text))
        # FIRST, then rounds of two accepted and one corrected token.
        kinds = [Kind.FIRST]
        kinds += [
            Kind.BONUS if plain else Kind.CORRECTED if i % 3 == 2 else Kind.ACCEPTED
            for i in range(len(tokens) - 1)
        ]
        return Completion(
            prompt_tokens=len(ids),
            text=text,
            token_ids=tokens,
            kinds=tuple(kinds[: len(tokens)]),
            logprobs=(-0.5,) * len(tokens) if sampling.logprobs else None,
            finish_reason="length",
            stats=Stats.from_kinds(
                kinds[: len(tokens)],
                spec.num_drafts,
                prefill_s=0.25,
                decode_s=1.0 if plain else 0.5,
            ),
        )

    def step(self, count: int) -> None:
        if self.fail_after is not None and count >= self.fail_after:
            raise self.error


@pytest.fixture
def engine(monkeypatch):
    fake = FakeEngine()

    class Generator:
        def __init__(self, model, params, tokenizer, *, spec, max_len, batch_size, channels):
            self.tokenizer, self.spec, self.max_len = tokenizer, spec, max_len
            fake.generators.append((spec, max_len, batch_size))
            fake.channels = channels

        def warmup(self, sampling):
            fake.warmups.append(sampling)

        def encode(self, prompt):
            if isinstance(prompt, str) and self.tokenizer is None:
                raise InputError("this checkpoint has no tokenizer")
            return [ord(c) for c in prompt] if isinstance(prompt, str) else list(prompt)

        def as_completed(self, prompts, sampling, progress=None):
            fake.runs.append((self.spec, [list(p) for p in prompts], sampling))
            order = list(enumerate(prompts))
            for count, (i, prompt) in enumerate(reversed(order) if fake.reverse else order):
                fake.step(count)
                completion = fake.complete(prompt, sampling, i, self.spec)
                if progress is not None:
                    progress(len(completion.token_ids))
                yield i, completion

        def stream(self, prompt, sampling):
            fake.runs.append((self.spec, [list(prompt)], sampling))
            completion = fake.complete(prompt, sampling, 0, self.spec)
            last = len(completion.token_ids) - 1
            pairs = zip(completion.text, completion.kinds, strict=True)
            for i, (text, kind) in enumerate(pairs):
                fake.step(i)
                end = completion if i == last else None
                yield Delta(text, (ord(text),), ((text, kind),), (), 0, end)

    def load(name, dtype=None, kernels="auto", dequantize=False, mesh=None):
        fake.loads.append((name, dtype, kernels))
        if fake.load_error is not None:
            raise fake.load_error
        return types.SimpleNamespace(config=None), {}, fake.tokenizer

    monkeypatch.setattr(vegas_jax, "load", load, raising=False)
    monkeypatch.setattr(vegas_jax, "Generator", Generator, raising=False)
    return fake


class FakeTerminal(io.StringIO):
    """A text file that says it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Call it in the test to make stdout and stderr terminals; it returns both."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def start():  # not before the test itself: pytest sets the streams anew for it
        out, err = FakeTerminal(), FakeTerminal()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        return out, err

    return start
