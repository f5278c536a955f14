"""A shape's two tables: what the parts of a round take, and how fast each method decodes."""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

from benchmarks.gpu.acceptance import best_gamma, by_position, tokens_a_round
from benchmarks.gpu.parts import (
    MANY_DRAFTS,
    PartPrograms,
    Parts,
    Roofline,
    compile_decode,
    draft_keys,
    round_seconds,
)
from benchmarks.gpu.peers import compile_cudnn, cudnn_step_seconds
from benchmarks.gpu.workload import Models, Workload
from pallas_kernels.bench.table import Table
from vegas_jax import SpecConfig

METHODS = {
    "streaming": SpecConfig(method="streaming"),
    "vegas, single positions (as published)": SpecConfig.published(),
    "vegas, blocks of 16, pool (0, 7)": SpecConfig(),
}
PLAIN = SpecConfig(method="plain")
TRAINED = 32768  # tokens: the longest texts that the shipped checkpoint was trained on
PARTS = {
    "B x S": 11,
    "part": 52,
    "ms": 8,
    "roofline ms": 8,
    "of roofline": 8,
    "over plain": 6,
}
SPEED = {
    "B x S": 11,
    "method": 52,
    "keys": 5,
    "drafts": 3,
    "tokens a round": 6,
    "ms a round": 8,
    "tokens/s": 8,
    "over plain": 6,
    "cost model": 6,
}

Shares = dict[float, list[float]]  # by ratio, `by_position`


@dataclasses.dataclass(frozen=True)
class Options:
    """What the methods are tuned over, and with what.

    Attributes:
      max_drafts: the most drafts a round.
      ratios: shares of the context that a draft may attend to.
      threads: that compile.
      cudnn: whether plain decoding is measured with cuDNN's attention too.
    """

    max_drafts: int
    ratios: tuple[float, ...]
    threads: int
    cudnn: bool


def measure(work: Workload, roofline: Roofline, options: Options) -> None:
    """Prints both tables of one shape."""
    size = f"{work.batch} x {work.rows:,}"
    with worker_pool(options.threads) as pool:
        print(f"{size}: compiling, which takes minutes", file=sys.stderr, flush=True)
        cudnn = pool.submit(compile_cudnn, work) if options.cudnn else None
        plain_program = pool.submit(compile_decode, work, PLAIN)
        programs = {name: PartPrograms(work, method, pool) for name, method in METHODS.items()}
        # Acceptance by the small model, while the large one's programs are compiled.
        shares = acceptances(work, options)
        for program in programs.values():
            program.wait()  # compiling uses the GPU too
        cudnn_program = None if cudnn is None else cudnn.result()

        plain = round_seconds(work, PLAIN, plain_program.result())[0]
        floor = roofline.seconds(work.batch * work.length)
        table = Table(PARTS)

        def row(part: str, seconds: float, floor: float | None = None) -> None:
            floors = ["", ""] if floor is None else [f"{floor * 1e3:.3f}", f"{floor / seconds:.1%}"]
            table.row([size, part, f"{seconds * 1e3:.3f}", *floors, f"{seconds / plain:.3f}x"])

        row("plain step", plain, floor)
        if cudnn_program is not None:
            seconds = cudnn_step_seconds(work, cudnn_program)
            row("plain step, greedy, attention by cuDNN", seconds, floor)
        parts: dict[str, Parts] = {}
        for name, method in METHODS.items():
            found = parts[name] = programs[name].measure()
            row(f"{name}: draft step", found.draft, roofline.seconds(draft_keys(work, method)))
            row(f"{name}: verify {MANY_DRAFTS + 1}", found.verify, floor)
            if found.select:
                row(f"{name}: select", found.select)
        print()
        for name, found in parts.items():
            if found.select and "streaming" in parts:
                selection = found.select + found.verify - parts["streaming"].verify
                share = selection / found.round(MANY_DRAFTS)
                print(f"{name}: selection, and making its scores: {share:.1%} of such a round")
        print(flush=True)

        best = {
            name: tune(work, METHODS[name], shares[name], parts[name], roofline) for name in METHODS
        }
        compiling = {name: programs[name].loop(best[name]) for name in METHODS}
        loops = {name: program.result() for name, program in compiling.items()}

    table = Table(SPEED)
    rate = work.batch / plain
    table.row([size, "plain", "", "", "1.00", f"{plain * 1e3:.2f}", f"{rate:.1f}", "1.00x", ""])
    for name, config in best.items():
        seconds, tokens = round_seconds(work, config, loops[name])
        speed = work.batch * tokens / seconds
        modelled = _modelled(work, config, shares[name], parts[name], roofline)
        table.row(
            [
                *(size, name, f"{config.sparse_ratio:.1%}", str(config.num_drafts)),
                *(f"{tokens:.2f}", f"{seconds * 1e3:.2f}", f"{speed:.1f}"),
                *(f"{speed / rate:.2f}x", f"{modelled[0] / modelled[1] * plain:.2f}x"),
            ]
        )
    if work.rows > TRAINED:
        print_modelled(table, work, parts, plain, roofline, options)
    print()


@contextlib.contextmanager
def worker_pool(threads: int) -> Iterator[Executor]:
    """A pool that waits for nothing once something went wrong."""
    pool = ThreadPoolExecutor(threads)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def print_modelled(
    table: Table,
    work: Workload,
    parts: dict[str, Parts],
    plain: float,
    roofline: Roofline,
    options: Options,
) -> None:
    """Rows by the cost model with the acceptance of texts no longer than the training's."""
    shares = _acceptances_at_trained_length(work.models, work.new_tokens, options)
    for name, method in METHODS.items():
        config = tune(work, method, shares[name], parts[name], roofline)
        tokens, seconds = _modelled(work, config, shares[name], parts[name], roofline)
        table.row(
            [
                f"{work.batch} x {work.rows:,}",
                f"{name}; acceptance at {TRAINED // 1024}K",
                *(f"{config.sparse_ratio:.1%}", str(config.num_drafts), f"{tokens:.2f}"),
                *("", "", "", f"{tokens / seconds * plain:.2f}x"),
            ]
        )


def acceptances(work: Workload, options: Options) -> dict[str, Shares]:
    """Of all methods and ratios."""
    work.small_cache  # noqa: B018  # made once, before threads ask for it
    jobs = [(name, ratio) for name in METHODS for ratio in options.ratios]
    configs = [tuned(METHODS[name], options.max_drafts, ratio) for name, ratio in jobs]
    with worker_pool(min(4, options.threads)) as pool:
        found = list(pool.map(lambda config: by_position(work, config), configs))
    result: dict[str, Shares] = {name: {} for name in METHODS}
    for (name, ratio), shares in zip(jobs, found, strict=True):
        result[name][ratio] = shares
    return result


@functools.lru_cache(maxsize=1)
def _acceptances_at_trained_length(
    models: Models, new_tokens: int, options: Options
) -> dict[str, Shares]:
    return acceptances(Workload(models, 4, TRAINED, new_tokens), options)


def tuned(config: SpecConfig, gamma: int, ratio: float) -> SpecConfig:
    """The same with gamma drafts a round, which attend to that share of the context."""
    return dataclasses.replace(config, num_speculative_tokens=gamma, sparse_ratio=ratio)


def tune(
    work: Workload, method: SpecConfig, shares: Shares, parts: Parts, roofline: Roofline
) -> SpecConfig:
    """The ratio and the number of drafts that write the most tokens a second by the cost model."""
    candidates = []
    for ratio, accepted in shares.items():
        base = tuned(method, method.num_drafts, ratio)
        gamma = best_gamma(accepted, parts_with(work, base, parts, roofline))
        candidates.append(tuned(method, gamma, ratio))

    def speed(config: SpecConfig) -> float:
        tokens, seconds = _modelled(work, config, shares, parts, roofline)
        return tokens / seconds

    return max(candidates, key=speed)


def _modelled(
    work: Workload, config: SpecConfig, shares: Shares, parts: Parts, roofline: Roofline
) -> tuple[float, float]:
    """Tokens and seconds of a round."""
    gamma = config.num_drafts
    tokens = tokens_a_round(shares[config.sparse_ratio], gamma)
    return tokens, parts_with(work, config, parts, roofline).round(gamma)


def parts_with(work: Workload, config: SpecConfig, parts: Parts, roofline: Roofline) -> Parts:
    """Parts, measured with the default ratio, for another one: more keys, more bytes to read."""
    default = dataclasses.replace(config, sparse_ratio=SpecConfig().sparse_ratio)
    more = draft_keys(work, config) - draft_keys(work, default)
    return dataclasses.replace(parts, draft=parts.draft + more * roofline.row / roofline.bandwidth)
