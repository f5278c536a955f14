"""`select_top_k` for Hopper: bisects for the k-th score with a row's scores in registers.

A cluster of thread blocks holds a row, each warp a contiguous run of it, and reads it once. Each
step of a bisection (see `bisect`) compares all entries with one threshold, or three, and sums the
outcomes over the cluster. When exactly k entries pass, the same sums, taken over the warps before
it, tell each warp where the position of its first passing entry belongs.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.select import bisect, sm90_lanes

STEP = sm90_lanes.WARPS * sm90_lanes.TILE  # entries that a warpgroup loads at once
MAX_WARPGROUPS = 4  # in a block: 512 threads of at most 128 registers
MAX_STEPS = 32  # in a warpgroup: 128 entries in a thread's registers
MAX_BLOCK_STEPS = 80  # in all warpgroups of a block
FEW_STEPS, LONE_STEPS = 4, 8  # 16 and 32 entries, see `heuristic`
MAX_BLOCKS = 8  # in a cluster, on any device of compute capability 9.0
MAX_SIZE = 262_144  # a sequence of 256K; the blocks of a cluster hold 327,680
MULTIPROCESSORS = 132  # of an H100 or H200 SXM


@dataclasses.dataclass(frozen=True)
class Config:
    """How a row is spread over threads.

    Attributes:
      blocks: in the cluster that holds a row.
      warpgroups: in a block.
    """

    blocks: int
    warpgroups: int

    @property
    def tile(self) -> int:
        """The size of a row is padded to a multiple of this."""
        return self.blocks * self.warpgroups * STEP

    def thresholds(self, size: int) -> int:
        """How many thresholds a step counts at, for rows of `size`.

        Three take half as many exchanges of counts as one, and one and a half times as many
        comparisons, which pays with few entries in a thread. Their counts share words.
        """
        padded = -(-size // self.tile) * self.tile
        few = padded <= self.tile * LONE_STEPS
        return 3 if few and padded <= sm90_lanes.MAX_PAIRED else 1


def heuristic(rows: int, size: int) -> Config:
    """Many rows: one block each, if it holds them. Few: as many blocks as the device has for them.

    Warps wait for one another at each step, so that fewer are better where there are few rows.

    Kernel times by the profiler on an H200 (jax 0.11.2, 2026-11-29), scores not in L2:

      rows x size, k          blocks x warpgroups: us
      288 x 2048, 144         1 x 1: 5.9, 1 x 2: 7.2, 2 x 1: 8.7
      288 x 32768, 2304       1 x 4: 48, 2 x 4: 66
      144 x 98304, 6912       2 x 4: 86, 4 x 4: 104, 8 x 4: 194
      8 x 2048, 144           1 x 1: 3.4, 1 x 2: 3.7, 1 x 4: 4.3, 2 x 1: 5.3
      8 x 32768, 2304         8 x 1: 9.8, 4 x 2: 10.3, 8 x 2: 10.5, 4 x 4: 11.7, 4 x 1: 11.8
      1 x 131072, 9216        8 x 1: 19.6, 8 x 2: 20.8, 8 x 4: 22.1, 4 x 2: 22.7, 4 x 4: 23.9
    """
    blocks = 1
    while (
        blocks < MAX_BLOCKS
        and 2 * blocks * rows <= MULTIPROCESSORS
        and blocks * LONE_STEPS * STEP < size
    ):
        blocks *= 2
    steps = {1: FEW_STEPS, MAX_BLOCKS: MAX_STEPS}.get(blocks, LONE_STEPS)
    warpgroups = min(pl.cdiv(size, blocks * steps * STEP), MAX_WARPGROUPS if blocks == 1 else 2)
    while blocks * warpgroups * min(MAX_STEPS, MAX_BLOCK_STEPS // warpgroups) * STEP < size:
        if warpgroups < MAX_WARPGROUPS:
            warpgroups += 1
        else:
            blocks += 1
    return Config(blocks, warpgroups)


def refuses(scores: Float[Array, "*rest M"], k: Int[Array, "*rest"], max_k: int) -> str | None:
    """See `pallas_kernels.dispatch.Implementation`."""
    size = scores.shape[-1]
    if scores.size == 0:
        return f"`scores` must not be empty, but is {list(scores.shape)}"
    if size > MAX_SIZE:
        return f"`scores` must have at most {MAX_SIZE} entries a row, but has {size}"
    return None


def select_top_k(
    scores: Float[Array, "*rest M"],
    k: Int[Array, "*rest"],
    max_k: int,
    config: Config | None = None,
) -> tuple[Int[Array, "*rest max_k"], Int[Array, "*rest"]]:
    """See `pallas_kernels.select_top_k`; scores are float32."""
    *rest, size = scores.shape
    rows = int(np.prod(rest))
    config = config or heuristic(rows, size)
    padded = -(-size // config.tile) * config.tile
    scores = scores.reshape(rows, size)
    if padded > size:
        scores = jnp.pad(scores, [(0, 0), (0, padded - size)], constant_values=-jnp.inf)
    thresholds = config.thresholds(size)
    warps = config.blocks * config.warpgroups * sm90_lanes.WARPS
    sums = (2, sm90_lanes.words_of(thresholds), warps)
    kernel = plgpu.kernel(
        functools.partial(_kernel, config=config, thresholds=thresholds),
        out_type=[
            jax.ShapeDtypeStruct((rows, max_k), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
        ],
        scratch_types=[plgpu.SMEM(sums, jnp.int32)],
        grid=(rows,),
        grid_names=("row",),
        cluster=(config.blocks,),
        cluster_names=("block",),
        num_threads=config.warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    positions, counts = kernel(scores, k.reshape(rows))
    return positions.reshape(*rest, max_k), counts.reshape(rest)


def _kernel(
    scores_ref: Any,
    k_ref: Any,
    positions_ref: Any,
    counts_ref: Any,
    sums: Any,
    *,
    config: Config,
    thresholds: int,
) -> None:
    """One warpgroup's part of a row: loads its run, takes part in each count, writes positions."""
    row = lax.axis_index("row")
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    size = scores_ref.shape[1]
    run = size // (config.blocks * config.warpgroups)
    first = (block * config.warpgroups + warpgroup) * run
    layout = sm90_lanes.run_layout(run)
    scores = plgpu.load(scores_ref.at[row, pl.ds(first, run)], layout=layout, optimized=False)
    scores = jnp.where(jnp.abs(scores) < np.finfo(np.float32).tiny, 0.0, scores)
    position = first + plgpu.broadcasted_iota(jnp.int32, (run,), 0, layout=layout)

    def counts(masks: list[Bool[Array, " run"]], step: Int[Array, ""]) -> list[Int[Array, ""]]:
        return sm90_lanes.counts(masks, sums, step & 1, blocks=config.blocks)

    k = jnp.clip(k_ref[row], 0, positions_ref.shape[1])
    score, k, reached, step = bisect.bisect_scores(
        lambda numbers, step: counts([scores >= x for x in numbers], step), k, thresholds
    )
    # Not -1, position, size: Mosaic GPU (jax 0.11.2) compares this array as unsigned.
    order = jnp.where(scores > score, 0, jnp.where(scores == score, position + 1, size + 1))
    end, step = bisect.bisect_order(
        lambda ends, step: counts([order < x for x in ends], step),
        size + 1,
        k,
        reached,
        step,
        thresholds,
    )
    sm90_lanes.compact(order < end, first, row, positions_ref, sums, step & 1, blocks=config.blocks)

    @pl.when((block == 0) & (warpgroup == 0))
    def _() -> None:
        counts_ref[row] = k
