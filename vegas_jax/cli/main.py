"""Continues prompts with a checkpoint, and says what speculation gained.

    python -m vegas_jax.decode --flagfile=configs/quickstart.flags

Texts go to stdout, or as JSONL records to --output; everything else goes to stderr. Exit codes:
0 done, 2 for input that cannot be used (one sentence says why), 130 after Ctrl-C, 141 when the
reader of stdout went away.
"""

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl.flags import Error as FlagError
from absl.flags import FlagValues

from vegas_jax.cli import chat as chats
from vegas_jax.cli import comparison, flags, hosts, records, running
from vegas_jax.cli.chat import Chat
from vegas_jax.cli.prompts import Prompt, read_prompts
from vegas_jax.cli.terminal import Stderr, Stdout, say_error, silence_stdout
from vegas_jax.completion import Completion
from vegas_jax.config import SamplingParams, SpecConfig
from vegas_jax.errors import InputError, NonFiniteLogitsError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments (by default sys.argv[1:]); returns the exit code."""
    try:
        values = flags.parse(sys.argv[1:] if argv is None else argv)
        code = show_help(values) if values.help else decode(values)
        sys.stdout.flush()
        return code
    except (FlagError, InputError, NonFiniteLogitsError) as error:
        say_error(str(error).removeprefix("ERROR:: "))  # absl's own prefix
        return 2
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        say_error("out of memory: lower --batch_size, --max_len or --max_prompt_tokens")
        return 2
    except KeyboardInterrupt:
        say_error("interrupted before any prompt was decoded")
        return 130
    except BrokenPipeError:
        silence_stdout()
        return 141
    except OSError as error:  # a full disk behind stdout, for instance
        silence_stdout()
        say_error(f"cannot write: {error.strerror or error}")
        return 2


def show_help(values: FlagValues) -> int:
    """Prints what the command does and its flags."""
    print(f"{__doc__}\nflags:{values.get_help()}")
    return 0


def decode(values: FlagValues) -> int:
    """Does what the flags say; everything that can be checked is, before the checkpoint loads."""
    spec, sampling = flags.spec_config(values), flags.sampling_params(values)
    hosts.join(values)
    chat = chats.of_flags(values)
    prompts = read_prompts(
        values.prompt,
        values.prompt_file,
        field=values.prompt_field,
        join_files=values.join_files,
        chat=chat is not None,
    )
    if chat is not None:
        prompts = chat.prompts(prompts)
    _check_flags(values, spec, sampling, prompts)
    stderr = Stderr(quiet=not hosts.leads(values))
    settings = _settings(values, prompts, chat, spec, sampling)
    finished = _finished_before(values, settings)
    todo = [i for i, prompt in enumerate(prompts) if prompt.id not in finished]
    if finished:
        stderr.note(f"{len(finished)} of {len(prompts)} prompts are in --output already: skipped")
    if not todo:
        return 0
    if isinstance(sampling.seed, tuple):
        seeds = tuple(sampling.seed[i] for i in todo)
        sampling = dataclasses.replace(sampling, seed=seeds)
    new: dict[int, Completion] = {}
    try:
        _decode(values, spec, sampling, [prompts[i] for i in todo], chat, settings, new, stderr)
    except KeyboardInterrupt:
        stderr.note(_interrupted(values, len(finished) + len(new), len(prompts)))
        return 130
    return 0


def _decode(
    values: FlagValues,
    spec: SpecConfig,
    sampling: SamplingParams,
    prompts: Sequence[Prompt],
    chat: Chat | None,
    settings: Mapping[str, Mapping[str, Any]],
    finished: dict[int, Completion],
    stderr: Stderr,
) -> None:
    """Loads the checkpoint and runs; `finished` gets each completion once it is safe."""
    engine, requests = _load(values, sampling, prompts, chat, stderr)
    leads = hosts.leads(values)
    output, trace = (values.output, values.trace) if leads else (None, None)
    folder = Path(trace) if trace else None
    stdout = Stdout(quiet=not leads)

    def keep(index: int, completion: Completion) -> None:
        if output:
            name = requests[index].id
            record = records.make_record(name, completion, settings[name])
            records.append(Path(output), record)
        finished[index] = completion
        if chat is not None and chat.hides(engine.tokenizer, completion):
            stderr.note(
                f"{requests[index].id}: the reply has nothing in its final channel;"
                " --channels=all shows the others"
            )

    if values.stream:
        try:
            totals = running.run_streamed(
                engine, spec, sampling, requests, keep, stdout, stderr, folder
            )
        finally:
            stdout.end_line()
    else:
        show = None if output else running.in_order(requests, engine, stdout, stderr)
        totals = running.run_batched(engine, spec, sampling, requests, keep, show, stderr, folder)
    rows = [(spec.method, totals)]
    lines: list[str] = []
    if values.compare_plain:
        plain, lines = comparison.with_plain(
            engine, spec, sampling, requests, finished, totals, stderr
        )
        rows.append(("plain", plain))
    stderr.table(rows)
    for line in lines:
        stderr.note(line)


def _check_flags(
    values: FlagValues, spec: SpecConfig, sampling: SamplingParams, prompts: Sequence[Prompt]
) -> None:
    """Refuses what makes no sense together, and empty values, as an unset shell variable leaves."""
    for name in ("checkpoint", "mesh", "output", "prompt_field", "trace"):
        if getattr(values, name) == "":
            raise InputError(f"--{name} is empty: give it a value or leave it out")
    if values.compare_plain and spec.method == "plain":
        raise InputError("--compare_plain needs a --method other than plain")
    if values.stream and values.batch_size > 1:
        raise InputError("--stream goes prompt by prompt: leave out --batch_size")
    if sampling.max_new_tokens is None and values.max_len is None:
        raise InputError("--max_new_tokens=none needs --max_len")
    if isinstance(sampling.seed, tuple) and len(sampling.seed) != len(prompts):
        raise InputError(f"--seed has {len(sampling.seed)} seeds for {len(prompts)} prompts")
    if values.trace and hosts.leads(values):
        folder = Path(values.trace)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"--trace: cannot write to {str(folder)!r}: {error.strerror or error}"
            ) from None


def _settings(
    values: FlagValues,
    prompts: Sequence[Prompt],
    chat: Chat | None,
    spec: SpecConfig,
    sampling: SamplingParams,
) -> dict[str, dict[str, Any]]:
    """What decides each prompt's record, for telling on a resumed run whether it is the same."""
    names = ("checkpoint", "dtype", "max_prompt_tokens")
    shared = {name: getattr(values, name) for name in names}
    shared |= dataclasses.asdict(spec) | dataclasses.asdict(sampling)
    if chat is not None:
        shared |= chat.settings()
    if sampling.max_new_tokens is None:  # else max_len decides nothing
        shared["max_len"] = values.max_len
    seeds = sampling.seed if isinstance(sampling.seed, tuple) else (sampling.seed,) * len(prompts)
    return {
        prompt.id: shared | {"seed": seed, "prompt_sha256": prompt.digest}
        for prompt, seed in zip(prompts, seeds, strict=True)
    }


def _finished_before(
    values: FlagValues, settings: Mapping[str, Mapping[str, Any]]
) -> frozenset[str]:
    if not values.output:
        return frozenset()
    path = Path(values.output)

    def find() -> frozenset[str]:
        records.prepare(path)
        return records.resume(path, settings)

    return hosts.agree(values, list(settings), find)


def _load(
    values: FlagValues,
    sampling: SamplingParams,
    prompts: Sequence[Prompt],
    chat: Chat | None,
    stderr: Stderr,
) -> tuple[running.Engine, list[running.Request]]:
    """The checkpoint, and the prompts as token ids cut to --max_prompt_tokens."""
    start = time.perf_counter()
    dtype = None if values.dtype == "auto" else values.dtype
    name = values.checkpoint
    loaded = running.load(name, dtype, values.kernels, values.dequantize, values.mesh)
    stderr.note(f"loaded {name} in {time.perf_counter() - start:.1f} s")
    requests = running.encode(loaded, prompts, chat, values.max_prompt_tokens, stderr)
    longest = max(len(request.token_ids) for request in requests)
    max_len = values.max_len or longest + (sampling.max_new_tokens or 0)
    running.check_lengths(requests, sampling.max_new_tokens, max_len)
    batch_size = min(values.batch_size, len(requests))
    channels = chat.channels if chat is not None else None
    sizes = {"max_len": max_len, "batch_size": batch_size}
    return dataclasses.replace(loaded, channels=channels, **sizes), requests


def _interrupted(values: FlagValues, done: int, prompts: int) -> str:
    line = f"interrupted: {done} of {prompts} prompts are done"
    if values.output:
        line += f" and in {values['output'].value}; run the same command again for the rest"
    return line
