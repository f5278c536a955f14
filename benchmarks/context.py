"""Decode speed and acceptance by context length: plain, streaming and vegas in one run.

    python -m benchmarks.context --lengths=4096,8192,16384

Every method continues the same held-out texts from the same prefilled cache, at temperature 0.8.
Tokens per second are of decoding alone (no prefill, no compilation), tokens per round is the mean
acceptance length.
"""

import dataclasses
import datetime
import platform
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import vegas_jax
from benchmarks.teacher_forced import expected_acceptance, summary
from benchmarks.texts import documents
from vegas_jax import Processors, SamplingParams, SpecConfig, Stats
from vegas_jax.compiled import begin_jit, decode_jit, prefill_slot
from vegas_jax.errors import InputError
from vegas_jax.spec import init_state, new_requests

_LENGTHS = flags.DEFINE_list("lengths", ["4096", "8192", "16384"], "Prompt lengths, in tokens.")
_TEXTS = flags.DEFINE_integer("texts", 3, "Texts per length.")
_NEW = flags.DEFINE_integer("max_new_tokens", 256, "Tokens to emit for each text.")
_GAMMA = flags.DEFINE_integer("num_speculative_tokens", 6, "Drafts a round.")
_RATIO = flags.DEFINE_float("sparse_ratio", 0.07, "Share of the context a draft attends to.")
_MIN = flags.DEFINE_integer("sparse_min_tokens", 256, "... but at least so many keys.")
_SELECTIONS = flags.DEFINE_list(
    "selections",
    ["1:0:0", "16:0:7"],
    "Selections of vegas to compare, as block size:back:ahead; 1:0:0 is as published.",
)
_ACCEPTANCE = flags.DEFINE_enum(
    "acceptance",
    "rejection",
    ["rejection", "coupled"],
    "With coupled all methods emit the same tokens, so that tokens a round compare pair by pair.",
)
_DENSE = flags.DEFINE_boolean("dense", False, "Drafts with all keys as well: the upper bound.")
_FORCED = flags.DEFINE_boolean(
    "teacher_forced",
    False,
    "Instead of decoding: the expected acceptance of drafts along the next tokens of the texts.",
)
_CHECKPOINT = flags.DEFINE_string("checkpoint", "codelm-16m", "Folder or shipped name.")
_DTYPE = flags.DEFINE_string("dtype", None, "Compute dtype; by default what is fast here.")


def selections() -> list[tuple[int, int, int]]:
    """The value of --selections: block size, back and ahead of each."""
    found = []
    for text in _SELECTIONS.value:
        parts = text.split(":")
        if len(parts) != 3 or not all(part.isdecimal() for part in parts):
            raise InputError(f"--selections has {text!r}, but must have values like 16:0:7")
        block, back, ahead = map(int, parts)
        found.append((block, back, ahead))
    return found


def lengths() -> list[int]:
    """The value of --lengths."""
    for text in _LENGTHS.value or [""]:
        if not text.isdecimal() or int(text) < 2:
            raise InputError(f"--lengths has {text!r}, but must have numbers of at least 2")
    return [int(text) for text in _LENGTHS.value]


def check_flags() -> None:
    """InputError for what no row could be made of."""
    lengths()
    methods()
    if _TEXTS.value < 1:
        raise InputError(f"--texts is {_TEXTS.value}, but must be at least 1")
    # Two rounds after the first, for a standard error; or one token after that of the prefill.
    least = 3 * (_GAMMA.value + 1) if _FORCED.value else 2
    if _NEW.value < least:
        raise InputError(f"--max_new_tokens is {_NEW.value}, but must be at least {least}")


def methods() -> dict[str, SpecConfig]:
    """What is compared, by its name in the table."""
    base = SpecConfig(
        num_speculative_tokens=_GAMMA.value,
        sparse_ratio=_RATIO.value,
        sparse_min_tokens=_MIN.value,
        acceptance=_ACCEPTANCE.value,
    )
    result = {
        "plain": dataclasses.replace(base, method="plain"),
        "streaming": dataclasses.replace(base, method="streaming"),
    }
    if _DENSE.value:
        result["dense"] = dataclasses.replace(base, method="dense")
    for block, back, ahead in selections():
        name = f"vegas, blocks of {block}" if block > 1 else "vegas, single positions"
        name += f", pool ({back}, {ahead})" if back or ahead else ""
        name += " (as published)" if (block, back, ahead) == (1, 0, 0) else ""
        result[name] = dataclasses.replace(base, sparse_block_size=block, score_pool=(back, ahead))
    return result


class Bench:
    """A loaded model, and the shapes of one context length."""

    def __init__(self, length: int) -> None:
        self.model, self.params, self.tokenizer = vegas_jax.load(
            _CHECKPOINT.value, dtype=_DTYPE.value
        )
        self.length = length
        self.max_len = length + _NEW.value
        # Texts end at different places; none may end this measurement early.
        self.sampling = SamplingParams(max_new_tokens=_NEW.value, temperature=0.8, ignore_eos=True)
        self.static = {"model": self.model, "processors": Processors.of(self.sampling)}

    def prefill(self, text: list[int]) -> tuple[vegas_jax.KVCache, float]:
        """The cache of all but the last token, and the seconds it took."""
        spec = SpecConfig(num_speculative_tokens=_GAMMA.value)
        sizes = {"batch": 1, "max_len": self.max_len}
        cache = init_state(self.model, spec, self.sampling, **sizes).cache
        began = time.perf_counter()
        cache = prefill_slot(self.model, self.params, cache, text[:-1], 0)
        jax.block_until_ready(cache)
        return cache, time.perf_counter() - began

    def decode(
        self, spec: SpecConfig, cache: vegas_jax.KVCache, text: list[int], seed: int
    ) -> Stats:
        """Continues a text; compiles on the first call with this `spec`."""
        sizes = {"batch": 1, "max_len": self.max_len}
        state = init_state(self.model, spec, self.sampling, **sizes)
        state = state.replace(cache=jax.tree.map(jnp.copy, cache))
        requests = new_requests(
            self.model.config,
            spec,
            self.sampling,
            **sizes,
            limits=jnp.array([_NEW.value], jnp.int32),
            seeds=(seed,),
        )
        state = begin_jit(
            params=self.params,
            state=state,
            requests=requests,
            last_tokens=np.array(text[-1:], np.int32),
            lengths=np.array([len(text) - 1], np.int32),
            slots=np.zeros(1, np.int32),
            spec=spec,
            **self.static,
        )
        run = {"params": self.params, "spec": spec, **self.static}
        run["stop_on_any_done"] = np.bool_(False)
        state = decode_jit(state=state, max_rounds=np.int32(0), **run)
        jax.block_until_ready(state.requests.emitted)
        began = time.perf_counter()
        state = decode_jit(state=state, max_rounds=np.int32(2**31 - 1), **run)
        kinds = np.asarray(state.requests.kinds[0, : int(state.requests.emitted[0])])
        seconds = time.perf_counter() - began
        return Stats.from_kinds(kinds.tolist(), spec.num_drafts, prefill_s=0.0, decode_s=seconds)


def measure(length: int) -> list[list[str]]:
    """Table rows of one context length."""
    bench = Bench(length)
    texts = documents(bench.tokenizer, length, _TEXTS.value)
    found: dict[str, list[Stats]] = {name: [] for name in methods()}
    prefill_s = []
    for seed, text in enumerate(texts):
        cache, seconds = bench.prefill(text)
        prefill_s.append(seconds)
        for name, spec in methods().items():
            found[name].append(bench.decode(spec, cache, text, seed))
            last = found[name][-1]
            print(
                f"  {length} text {seed} {name}: {last.tokens_per_second:.1f} tokens/s, "
                f"{last.mean_acceptance_length:.2f} a round",
                file=sys.stderr,
                flush=True,
            )
        del cache
    rows = []
    speeds = {name: _tokens_per_second(stats) for name, stats in found.items()}
    for name, stats in found.items():
        emitted = sum(s.emitted - 1 for s in stats)
        per_round = emitted / sum(s.rounds for s in stats)
        accepted = sum(s.accepted for s in stats) / max(sum(s.drafted for s in stats), 1)
        rows.append(
            [
                f"{length:,}",
                name,
                f"{speeds[name]:.1f}",
                f"{speeds[name] / speeds['plain']:.2f}x",
                f"{per_round:.2f}",
                f"{accepted:.0%}" if spec_drafts(stats) else "",
            ]
        )
    # The first text's prefill includes compilation.
    print(f"prefill of {length} tokens: {min(prefill_s):.1f} s", file=sys.stderr, flush=True)
    return rows


def forced_rows(length: int) -> list[list[str]]:
    """Table rows of one context length with --teacher_forced."""
    bench = Bench(length)
    texts = documents(bench.tokenizer, bench.max_len, _TEXTS.value)
    found: dict[str, list[np.ndarray]] = {}
    for number, text in enumerate(texts):
        cache, _ = bench.prefill(text[:length])
        for name, spec in methods().items():
            if not spec.num_drafts:
                continue
            copied = jax.tree.map(jnp.copy, cache)
            rounds = expected_acceptance(bench.model, bench.params, copied, text, spec)
            found.setdefault(name, []).append(rounds)
            mean, error, _ = summary(rounds)
            progress = f"  {length} text {number} {name}: {mean:.3f} +- {error:.3f}"
            print(progress, file=sys.stderr, flush=True)
    rows = []
    for name, rounds in found.items():
        mean, error, tokens = summary(np.concatenate(rounds))
        rows.append([f"{length:,}", name, f"{mean:.3f}", f"{error:.3f}", f"{tokens:.2f}"])
    return rows


def spec_drafts(stats: list[Stats]) -> bool:
    """Whether anything was drafted."""
    return any(s.drafted for s in stats)


def _tokens_per_second(stats: list[Stats]) -> float:
    return sum(s.emitted - 1 for s in stats) / sum(s.decode_s for s in stats)


def main(argv: list[str]) -> None:
    """Prints the table as Markdown."""
    run = forced_rows if _FORCED.value else measure
    try:
        check_flags()
        rows = [row for length in lengths() for row in run(length)]
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    device = jax.devices()[0]
    print(
        f"{datetime.date.today()}, {device.device_kind} x{jax.device_count()} "
        f"({platform.machine()}), Python {platform.python_version()}, jax {jax.__version__}; "
        f"{_CHECKPOINT.value}, {_TEXTS.value} texts, {_NEW.value} new tokens each, gamma "
        f"{_GAMMA.value}, ratio {_RATIO.value:g}, at least {_MIN.value} keys, temperature 0.8, "
        f"{'teacher-forced' if _FORCED.value else _ACCEPTANCE.value}\n"
    )
    columns = ["tokens/s", "against plain", "tokens a round", "drafts accepted"]
    if _FORCED.value:
        columns = ["expected acceptance", "standard error", "tokens a round"]
    print(f"| context | method | {' | '.join(columns)} |")
    print("|---|---|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    app.run(main)
