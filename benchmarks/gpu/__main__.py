"""What decoding costs at Qwen3-8B's true size, and what drafting gains: `python -m benchmarks.gpu`.

The weights are those of the shipped checkpoint, grown into the large shape (`benchmarks.widen`):
what a step costs is the large model's, how many drafts are accepted is the small one's. Each
method's number of drafts a round is the best by the cost model, from its acceptance and its parts.
"""

import argparse
import dataclasses
import datetime
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.acceptance import best_gamma, by_position, tokens_a_round
from benchmarks.gpu.correctness import check_float32, show_divergences
from benchmarks.gpu.limits import compile_seconds, largest_context, try_context
from benchmarks.gpu.parts import PartPrograms, Parts, Roofline, compile_decode, draft_keys
from benchmarks.gpu.peers import compile_cudnn, cudnn_step_seconds, transformers_steps
from benchmarks.gpu.prefill import loss_by_position, matmul_rate, operations, prefill_seconds
from benchmarks.gpu.workload import QWEN3_8B, SMALL, Models, Workload
from pallas_kernels.bench import timing
from pallas_kernels.bench.__main__ import versions
from pallas_kernels.bench.table import Table
from pallas_kernels.dispatch import device_name, lacks
from vegas_jax import SpecConfig

METHODS = {
    "streaming": SpecConfig(method="streaming"),
    "vegas, single positions (as published)": SpecConfig.published(),
    "vegas, blocks of 16, pool (0, 7)": SpecConfig(),
}
PARTS = {"widths": {"B x S": 9, "part": 50, "ms": 8, "roofline ms": 8, "of roofline": 8}}
SPEED = {
    "B x S": 9,
    "method": 38,
    "drafts": 3,
    "tokens a round": 6,
    "ms a round": 8,
    "tokens/s": 8,
    "over plain": 6,
    "cost model": 6,
}


SECTIONS = ("peers", "correctness", "prefill", "limits", "decode")


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence."""

    def error(self, message: str) -> NoReturn:
        """Exits with 2."""
        self.exit(2, f"{message[:1].upper()}{message[1:]}.\n")


def shape(text: str) -> tuple[int, int]:
    """A value of --shapes: BxS."""
    batch, _, rows = text.partition("x")
    if not (batch.isdecimal() and rows.isdecimal() and int(batch) and int(rows)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a batch and a length, like 8x32768")
    return int(batch), int(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = Parser("python -m benchmarks.gpu", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--shapes", type=shape, nargs="+", help="BxS ...; default 8x32768 4x98304 1x131072 32x8192"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=SECTIONS,
        default=list(SECTIONS),
        help=f"some of {' '.join(SECTIONS)}; all by default",
    )
    parser.add_argument("--max_drafts", type=int, default=8, help="default %(default)s")
    parser.add_argument("--max_new_tokens", type=int, default=256, help="default %(default)s")
    parser.add_argument("--threads", type=int, default=12, help="that compile; default 12")
    chosen = parser.parse_args(arguments)
    for name in ("max_drafts", "max_new_tokens", "threads"):
        if getattr(chosen, name) < 1:
            parser.error(f"argument --{name}: must be at least 1, but is {getattr(chosen, name)}")
    small = jax.default_backend() != "gpu"
    if small:
        print("There is no GPU here: a small shape, whose times mean little.\n")
    shapes = chosen.shapes or (
        [(2, 1024)] if small else [(8, 32768), (4, 98304), (1, 131072), (32, 8192)]
    )
    for _, rows in shapes:
        if rows < chosen.max_new_tokens + 256:
            parser.error(f"argument --shapes: {rows} tokens leave no room for a text")

    peers = transformers_steps(shapes) if "peers" in chosen.only else {}  # JAX takes all memory
    print(f"{datetime.date.today()}, {device_name()}, {versions()}")
    copies = timing.copy_bandwidth(2**26 if small else 2**31)
    bandwidth = max(copies.values())
    print(f"device copy: {bandwidth / 1e12:.3f} TB/s, read + written; rooflines are against that")
    config = SMALL if small else QWEN3_8B
    print(
        f"{config.num_layers} layers, hidden {config.hidden_size}; the function, and with it all "
        "acceptance, is the shipped 16M checkpoint's\n",
        flush=True,
    )
    exact = None
    if "correctness" in chosen.only:
        exact = Models.load(config, "float32")
        if not check_float32(exact, rows=1024 if small else 4096, new_tokens=64):
            return 1
        exact = dataclasses.replace(exact, wide_params={})  # room for the others
    models = Models.load(config, "float32" if small else "bfloat16")
    roofline = Roofline.of(models.wide, models.wide_params, bandwidth)
    if exact is not None and not small:
        show_divergences(models, exact, rows=4096, new_tokens=256)
    if "prefill" in chosen.only:
        read_prompts(models, shapes, 1024 if small else 32768)
    if "limits" in chosen.only:
        find_limits(Workload(models, *shapes[0], chosen.max_new_tokens), roofline)
    if "peers" in chosen.only:
        print(f"transformers, a step, static cache, compiled: {peers}\n")
    for batch, rows in shapes if "decode" in chosen.only else ():
        measure(Workload(models, batch, rows, chosen.max_new_tokens), roofline, chosen)
    return 0


def find_limits(work: Workload, roofline: Roofline) -> None:
    """Prints how long the loop takes to compile, and how long a context fits."""
    cold, cached = compile_seconds(work)
    print(
        f"vegas' loop, {work.batch} x {work.rows:,}: from Python to a program in {cold:.1f} s, "
        f"from JAX's persistent cache {cached:.1f} s"
    )
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is not None:
        rows = largest_context(work.models, 4, roofline, limit)
        tried = try_context(work.models, 4, rows)
        print(f"4 x {rows:,} in the {limit / 2**30:.1f} GiB that JAX may use: {tried}")
    print(flush=True)


def read_prompts(models: Models, shapes: Sequence[tuple[int, int]], rows: int) -> None:
    """Prints the speed of prefill, and how far acceptance can be believed."""
    rate = matmul_rate(rows // 4)
    seconds, tokens = prefill_seconds(models, rows)
    reached = operations(models, tokens) / seconds
    print(
        f"\nprefill of {tokens:,} tokens: {seconds:.3f} s, {tokens / seconds:,.0f} tokens/s, "
        f"{reached / 1e12:.0f} TFLOP/s, {reached / rate:.0%} of a large bfloat16 product's "
        f"{rate / 1e12:.0f}"
    )
    longest = max(rows for _, rows in shapes)
    losses = ", ".join(f"{loss:.2f}" for loss in loss_by_position(models, longest))
    print(f"the small model's loss by position, nats, each 8,192 tokens: {losses}\n", flush=True)


def measure(work: Workload, roofline: Roofline, chosen: argparse.Namespace) -> None:
    """Prints both tables of one shape."""
    size = f"{work.batch} x {work.rows:,}"
    with ThreadPoolExecutor(chosen.threads) as pool:
        cudnn = None
        if "peers" in chosen.only and lacks("cudnn") is None:
            cudnn = pool.submit(compile_cudnn, work)
        plain_program = pool.submit(compile_decode, work, SpecConfig(method="plain"))
        programs = {name: PartPrograms(work, method, pool) for name, method in METHODS.items()}
        # Acceptance by the small model, while the large one's programs are compiled.
        most = {name: with_drafts(method, chosen.max_drafts) for name, method in METHODS.items()}
        shares = {name: by_position(work, method) for name, method in most.items()}
        for found in programs.values():
            found.wait()  # compiling uses the GPU too
        if cudnn is not None:
            cudnn.result()
        plain_s, _ = decode(work, SpecConfig(method="plain"), plain_program.result())
        table = Table(PARTS["widths"])
        floor = roofline.seconds(work.batch * work.length)
        row(table, size, "plain step", plain_s, floor)
        if cudnn is not None:
            seconds = cudnn_step_seconds(work, cudnn.result())
            row(table, size, "plain step, greedy, attention by cuDNN", seconds, floor)
        parts: dict[str, Parts] = {}
        for name, method in METHODS.items():
            parts[name] = programs[name].measure(work.begin_wide(method))
            found = parts[name]
            draft_floor = roofline.seconds(draft_keys(work, method))
            row(table, size, f"{name}: draft step", found.draft, draft_floor)
            row(table, size, f"{name}: verify {method.num_drafts + 1}", found.verify, floor)
            if found.select:
                table.row([size, f"{name}: select", f"{found.select * 1e3:.3f}", "", ""])
        print()
        gammas = {name: best_gamma(shares[name], parts[name]) for name in METHODS}
        compiling = {
            name: pool.submit(compile_decode, work, with_drafts(method, gammas[name]))
            for name, method in METHODS.items()
        }
        decodes = {name: program.result() for name, program in compiling.items()}
        table = Table(SPEED)
        rate = work.batch / plain_s
        table.row([size, "plain", "", "1.00", f"{plain_s * 1e3:.2f}", f"{rate:.1f}", "1.00x", ""])
        for name, method in METHODS.items():
            gamma = gammas[name]
            seconds, tokens = decode(work, with_drafts(method, gamma), decodes[name])
            modelled = tokens_a_round(shares[name], gamma) * plain_s / parts[name].round(gamma)
            speed = work.batch * tokens / seconds
            table.row(
                [
                    size,
                    name,
                    str(gamma),
                    f"{tokens:.2f}",
                    f"{seconds * 1e3:.2f}",
                    f"{speed:.1f}",
                    f"{speed / rate:.2f}x",
                    f"{modelled:.2f}x",
                ]
            )
        print()


def with_drafts(config: SpecConfig, gamma: int) -> SpecConfig:
    """The same with gamma drafts a round."""
    return dataclasses.replace(config, num_speculative_tokens=gamma)


def decode(work: Workload, config: SpecConfig, program: object) -> tuple[float, float]:
    """Seconds and tokens of a sequence's round, while no sequence is done."""
    state = work.begin_wide(config)
    rounds = (work.new_tokens - 1) // (config.num_drafts + 1) - 2

    def run(state: object, count: int) -> object:
        return program(  # type: ignore[operator]
            params=work.models.wide_params,
            state=state,
            max_rounds=jnp.int32(count),
            stop_on_any_done=jnp.bool_(False),
        )

    state = run(state, 2)
    before = np.asarray(state.requests.emitted)
    began = time.perf_counter()
    state = run(state, rounds)
    emitted = np.asarray(state.requests.emitted) - before
    return (time.perf_counter() - began) / rounds, float(emitted.mean()) / rounds


def row(table: Table, size: str, part: str, seconds: float, floor: float) -> None:
    """A row of the table of parts."""
    table.row([size, part, f"{seconds * 1e3:.3f}", f"{floor * 1e3:.3f}", f"{floor / seconds:.1%}"])


if __name__ == "__main__":
    sys.exit(main())
