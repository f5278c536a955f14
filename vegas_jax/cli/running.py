"""One run over prompts that are already token ids: batched or streamed, with times and output."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

import vegas_jax
from vegas_jax.cli.chat import Chat
from vegas_jax.cli.prompts import Prompt
from vegas_jax.cli.summary import Totals, total
from vegas_jax.cli.terminal import Bar, Stderr, Stdout
from vegas_jax.completion import Completion, Delta
from vegas_jax.config import SamplingParams, SpecConfig
from vegas_jax.errors import InputError
from vegas_jax.sharding import parse_mesh
from vegas_jax.text import Channels


@dataclasses.dataclass(frozen=True)
class Engine:
    """A loaded checkpoint and the sizes to run it with."""

    model: Any
    params: Any
    tokenizer: Any
    max_len: int = 1
    batch_size: int = 1
    channels: Channels | None = None

    def generator(self, spec: SpecConfig) -> Any:
        """A `Generator` for this way of drafting."""
        return vegas_jax.Generator(
            self.model,
            self.params,
            self.tokenizer,
            spec=spec,
            max_len=self.max_len,
            batch_size=self.batch_size,
            channels=self.channels,
        )


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt ready to run."""

    id: str
    token_ids: tuple[int, ...]


def load(
    checkpoint: str, dtype: str | None, kernels: str, dequantize: bool, mesh: str | None
) -> Engine:
    """Loads a checkpoint; CheckpointError says what is wrong with it."""
    devices = None if mesh is None else parse_mesh(mesh)
    loaded = vegas_jax.load(
        checkpoint, dtype=dtype, kernels=kernels, dequantize=dequantize, mesh=devices
    )
    return Engine(*loaded)


def encode(
    engine: Engine,
    prompts: Sequence[Prompt],
    chat: Chat | None,
    max_prompt_tokens: int | None,
    stderr: Stderr,
) -> list[Request]:
    """The prompts as token ids, of which the last `max_prompt_tokens` are kept; InputError names
    the prompt that cannot be encoded."""
    # How long a generator's cache must be is known only after encoding: this one encodes only.
    generator = engine.generator(SpecConfig(method="plain"))
    requests = []
    cut = 0
    for prompt in prompts:
        try:
            content = prompt.content
            token_ids = generator.encode(
                content if chat is None else chat.encode(engine.tokenizer, content)
            )
        except InputError as error:
            raise InputError(f"prompt {prompt.id!r}: {error}") from None
        if max_prompt_tokens is not None and len(token_ids) > max_prompt_tokens:
            cut += 1
            token_ids = token_ids[-max_prompt_tokens:]
        requests.append(Request(prompt.id, tuple(token_ids)))
    if cut:
        stderr.note(f"kept the last {max_prompt_tokens} tokens of {cut} of {len(prompts)} prompts")
    return requests


def run_batched(
    engine: Engine,
    spec: SpecConfig,
    sampling: SamplingParams,
    requests: Sequence[Request],
    keep: Callable[[int, Completion], None],
    show: Callable[[int, Completion, Bar], None] | None,
    stderr: Stderr,
    trace: Path | None = None,
) -> Totals:
    """Decodes all requests, with a progress bar; `keep`, then `show` see each once it is done."""
    generator = _ready(engine, spec, sampling, stderr)
    completions = []
    wall_s = 0.0
    with (
        profiled(trace),
        stderr.bar(spec.method, len(requests), sampling.max_new_tokens) as bar,
    ):
        iterator = generator.as_completed(
            [request.token_ids for request in requests], sampling, progress=bar.add_tokens
        )
        while True:
            start = time.perf_counter()
            item = next(iterator, None)
            wall_s += time.perf_counter() - start
            if item is None:
                break
            index, completion = item
            completions.append(completion)
            bar.finish_prompt(len(completion.token_ids))
            keep(index, completion)
            if show is not None:
                show(index, completion, bar)
    return total(completions, wall_s)


def run_streamed(
    engine: Engine,
    spec: SpecConfig,
    sampling: SamplingParams,
    requests: Sequence[Request],
    keep: Callable[[int, Completion], None],
    stdout: Stdout,
    stderr: Stderr,
    trace: Path | None = None,
) -> Totals:
    """Decodes prompt by prompt and prints each round's text as it comes."""
    generator = _ready(engine, spec, sampling, stderr)
    if stdout.is_terminal and spec.num_drafts:
        stderr.legend()
    completions = []
    wall_s = 0.0
    with profiled(trace):
        for index, request in enumerate(requests):
            _announce(request, requests, stderr)
            stderr.note(f"reading {len(request.token_ids)} tokens")
            deltas = generator.stream(list(request.token_ids), _one_seed(sampling, index))
            completion = None
            start = time.perf_counter()
            for delta in deltas:
                wall_s += time.perf_counter() - start
                _write_delta(delta, stdout, engine.tokenizer is not None)
                completion = delta.completion or completion
                start = time.perf_counter()
            stdout.end_line()
            if completion is None:
                raise RuntimeError("the stream ended without a completion")
            completions.append(completion)
            keep(index, completion)
    return total(completions, wall_s)


def in_order(
    requests: Sequence[Request], engine: Engine, stdout: Stdout, stderr: Stderr
) -> Callable[[int, Completion, Bar], None]:
    """A `show` that prints texts in the prompts' order, holding back those that come early."""
    waiting: dict[int, Completion] = {}
    printed = 0

    def show(index: int, completion: Completion, bar: Bar) -> None:
        nonlocal printed
        waiting[index] = completion
        with bar.hidden() if printed in waiting else contextlib.nullcontext():
            while printed in waiting:
                completion = waiting.pop(printed)
                _announce(requests[printed], requests, stderr)
                has_text = engine.tokenizer is not None
                stdout.write(completion.text if has_text else _spelled(completion.token_ids))
                stdout.end_line()
                printed += 1

    return show


def check_lengths(requests: Sequence[Request], max_new_tokens: int | None, max_len: int) -> None:
    """InputError when a prompt and its completion exceed max_len.

    The generator checks this too, but a stream would find out only when the prompt's turn comes.
    """
    new = 1 if max_new_tokens is None else max_new_tokens
    for request in requests:
        if len(request.token_ids) + new > max_len:
            raise InputError(
                f"prompt {request.id!r} has {len(request.token_ids)} tokens; with {new} new ones"
                f" that is over --max_len={max_len}"
            )


@contextlib.contextmanager
def profiled(folder: Path | None) -> Iterator[None]:
    """Writes a profile of what happens inside to the folder, if there is one."""
    if folder is None:
        yield
        return

    with jax.profiler.trace(folder, create_perfetto_trace=True):
        yield


def _ready(engine: Engine, spec: SpecConfig, sampling: SamplingParams, stderr: Stderr) -> Any:
    generator = engine.generator(spec)
    start = time.perf_counter()
    generator.warmup(sampling)
    stderr.note(f"compiled {spec.method} in {time.perf_counter() - start:.1f} s")
    return generator


def _one_seed(sampling: SamplingParams, index: int) -> SamplingParams:
    if isinstance(sampling.seed, tuple):
        return dataclasses.replace(sampling, seed=sampling.seed[index])
    return sampling


def _write_delta(delta: Delta, stdout: Stdout, has_tokenizer: bool) -> None:
    if not has_tokenizer:
        stdout.write(_spelled(delta.token_ids) + " ")
    for text, kind in delta.segments:
        stdout.write(text, kind)


def _announce(request: Request, requests: Sequence[Request], stderr: Stderr) -> None:
    """Says on stderr whose text comes next, where there are several."""
    if len(requests) > 1:
        stderr.note(f"--- {request.id}")


def _spelled(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))
