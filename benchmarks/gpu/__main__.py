"""What decoding costs at Qwen3-8B's true size, and what drafting gains: `python -m benchmarks.gpu`.

The weights are those of the shipped checkpoint, grown into the large shape (`benchmarks.widen`):
what a step costs is the large model's, how many drafts are accepted is the small one's. Each
method's number of drafts a round and share of keys are the best by the cost model, from its
acceptance and its parts.
"""

import dataclasses
import datetime
import sys
from collections.abc import Sequence

import jax

from benchmarks.gpu.command import MOST_ROWS, run, shape
from benchmarks.gpu.compiling import compile_seconds
from benchmarks.gpu.correctness import check_float32, show_divergences
from benchmarks.gpu.limits import largest_context, try_context
from benchmarks.gpu.parts import Roofline
from benchmarks.gpu.peers import transformers_steps
from benchmarks.gpu.prefill import loss_by_position, matmul_rate, operations, prefill_seconds
from benchmarks.gpu.speed import Options, measure
from benchmarks.gpu.workload import QWEN3_8B, SMALL, Models, Workload
from pallas_kernels.bench import timing
from pallas_kernels.bench.__main__ import Parser, versions
from pallas_kernels.dispatch import device_name, lacks

SHAPES = [(8, 32768), (4, 98304), (1, 131072), (32, 8192)]
SMALL_SHAPES = [(2, 1024)]
FEWEST_NEW_TOKENS = 64  # with fewer there are too few rounds to time
SHORTEST_TEXT = 256
SECTIONS = ("peers", "correctness", "prefill", "limits", "decode")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = Parser("python -m benchmarks.gpu", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--shapes",
        type=shape,
        nargs="+",
        help="BxS ... of peers and decode (limits: the first); default 8x32768 4x98304 1x131072 "
        "32x8192; correctness and prefill have shapes of their own",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=SECTIONS,
        default=list(SECTIONS),
        help=f"some of {' '.join(SECTIONS)}; all by default",
    )
    parser.add_argument("--max_drafts", type=int, default=8, help="default %(default)s")
    parser.add_argument(
        "--ratios",
        type=float,
        nargs="+",
        default=[0.035, 0.07],
        help="shares of the context that a draft may attend to; default 0.035 0.07",
    )
    parser.add_argument("--max_new_tokens", type=int, default=256, help="default %(default)s")
    parser.add_argument("--threads", type=int, default=12, help="that compile; default 12")
    chosen = parser.parse_args(arguments)
    bounds = {"max_drafts": (1, 64), "max_new_tokens": (FEWEST_NEW_TOKENS, MOST_ROWS)}
    for name, (least, most) in {**bounds, "threads": (1, 1024)}.items():
        value = getattr(chosen, name)
        if not least <= value <= most:
            parser.error(f"argument --{name}: must be from {least} to {most}, but is {value}")
    for ratio in chosen.ratios:
        if not 0 < ratio <= 1:
            parser.error(f"argument --ratios: must be above 0 and at most 1, but is {ratio:g}")

    def check_room(shapes: Sequence[tuple[int, int]]) -> None:
        for batch, rows in shapes:
            room = rows - SHORTEST_TEXT
            if chosen.max_new_tokens > room:
                parser.error(
                    f"argument --max_new_tokens: {chosen.max_new_tokens} of the {rows} tokens of "
                    f"shape {batch}x{rows} leave less than {SHORTEST_TEXT} for a text"
                )

    check_room(chosen.shapes or SMALL_SHAPES)
    # Before JAX is asked anything: with its first answer it takes the GPU's memory.
    peers = transformers_steps(chosen.shapes or SHAPES) if "peers" in chosen.only else {}
    small = jax.default_backend() != "gpu"
    if small:
        print("There is no GPU here: a small shape, whose times mean little.\n")
    shapes = chosen.shapes or (SMALL_SHAPES if small else SHAPES)
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
    if exact is not None and small:
        print("bfloat16's divergences: only on a GPU", flush=True)
    elif exact is not None:
        show_divergences(models, exact, rows=4096, new_tokens=256)
    if "prefill" in chosen.only:
        read_prompts(models, shapes, 1024 if small else 32768)
    if "limits" in chosen.only:
        find_limits(Workload(models, *shapes[0], chosen.max_new_tokens), roofline)
    if "peers" in chosen.only:
        print(f"transformers, a step, static cache, compiled: {peers}\n")
    options = Options(
        max_drafts=chosen.max_drafts,
        ratios=tuple(chosen.ratios),
        threads=chosen.threads,
        cudnn="peers" in chosen.only and lacks("cudnn") is None,
    )
    for batch, rows in shapes if "decode" in chosen.only else ():
        measure(Workload(models, batch, rows, chosen.max_new_tokens), roofline, options)
    return 0


def find_limits(work: Workload, roofline: Roofline) -> None:
    """Prints how long the loop takes to compile, and how long a context fits."""
    cold, cached = compile_seconds(work.batch, work.rows)
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
        f"{reached / 1e12:.3g} TFLOP/s, {reached / rate:.0%} of a large bfloat16 product's "
        f"{rate / 1e12:.3g}"
    )
    longest = max(rows for _, rows in shapes)
    losses = ", ".join(f"{loss:.2f}" for loss in loss_by_position(models, longest))
    print(f"the small model's loss by position, nats, each 8,192 tokens: {losses}\n", flush=True)


if __name__ == "__main__":
    sys.exit(run(main))
