"""`select_top_k` for Hopper: bisects for the k-th score with a row's scores in registers.

A cluster of thread blocks holds a row. Each step of a bisection counts the entries that pass a
threshold, which is a score and a position: an entry passes if its score is higher, or if it is
equal and the position lower. So k entries pass the right one exactly, whatever the ties. In a last
step the counts of the warps before it tell each warp where its first passing entry belongs.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.select import sm90_lanes

STEP = sm90_lanes.WARPS * sm90_lanes.TILE  # entries that a warpgroup loads at once
MAX_WARPGROUPS = 4  # in a block: 512 threads of at most 128 registers
MAX_STEPS = 16  # in a warpgroup: 64 entries in a thread's registers
MAX_BLOCKS = 8  # in a cluster, on any device of compute capability 9.0
MAX_SIZE = MAX_BLOCKS * MAX_WARPGROUPS * MAX_STEPS * STEP

ABOVE_ALL = 0x7F800001  # `ordinal` of the number that would follow infinity
LOWEST = -0x7F800000  # `ordinal` of the lowest finite number

State = tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""], Int[Array, ""]]


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


def heuristic(rows: int, size: int) -> Config:
    """As few threads as hold the row."""
    warpgroups = min(MAX_WARPGROUPS, pl.cdiv(size, STEP))
    blocks = 1
    while blocks * warpgroups * MAX_STEPS * STEP < size:
        blocks *= 2
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
    warps = config.blocks * config.warpgroups * sm90_lanes.WARPS
    kernel = plgpu.kernel(
        functools.partial(_kernel, config=config),
        out_type=[
            jax.ShapeDtypeStruct((rows, max_k), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
        ],
        scratch_types=[plgpu.SMEM((2, warps), jnp.int32)],
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


def _kernel(scores_ref, k_ref, positions_ref, counts_ref, partials, *, config):
    row = lax.axis_index("row")
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    run = scores_ref.shape[1] // (config.blocks * config.warpgroups)
    first = (block * config.warpgroups + warpgroup) * run
    layout = sm90_lanes.run_layout(run)
    scores = plgpu.load(scores_ref.at[row, pl.ds(first, run)], layout=layout, optimized=False)
    scores = jnp.where(jnp.abs(scores) < np.finfo(np.float32).tiny, 0.0, scores)
    position = first + plgpu.broadcasted_iota(jnp.int32, (run,), 0, layout=layout)

    def count(mask, step):
        return sm90_lanes.count(mask, partials, step & 1, blocks=config.blocks)

    k = jnp.clip(k_ref[row], 0, positions_ref.shape[1])
    score, k, reached, step = bisect_scores(lambda low, step: count(scores >= low, step), k)
    # Entries above the threshold go first, then those at it by position, then the others. (Not -1,
    # position, ...: Mosaic GPU compares this array as unsigned.)
    size = scores_ref.shape[1]
    order = jnp.where(scores > score, 0, jnp.where(scores == score, position + 1, size + 1))
    end, step = bisect_order(lambda end, step: count(order < end, step), size + 1, k, reached, step)
    sm90_lanes.compact(
        order < end, first, row, positions_ref, partials, step & 1, blocks=config.blocks
    )

    @pl.when((block == 0) & (warpgroup == 0))
    def _():
        counts_ref[row] = k


def bisect_scores(
    count_from: Callable[[Float[Array, ""], Int[Array, ""]], Int[Array, ""]], k: Int[Array, ""]
) -> tuple[Float[Array, ""], Int[Array, ""], Int[Array, ""], Int[Array, ""]]:
    """Finds the k-th highest score, or a lower number that exactly k scores reach.

    Args:
      count_from: given a number and how many calls there were before, how many scores reach it.
      k: at least 0.

    Returns:
      The score, NaN for k = 0; k, lowered to the number of scores above -inf; how many scores reach
      the score; the number of calls.
    """
    low = jnp.int32(LOWEST)
    candidates = count_from(number(low), jnp.int32(0))
    k = jnp.minimum(k, candidates)
    nothing = k == 0
    low = jnp.where(nothing, ABOVE_ALL, low)
    reached = jnp.where(nothing, 0, candidates)

    def bisect(state: State) -> State:  # k scores or more reach `low`, fewer reach `high`
        low, high, reached, step = state
        middle = midpoint(low, high)
        reached_middle = count_from(number(middle), step)
        enough = reached_middle >= k
        low, high = jnp.where(enough, middle, low), jnp.where(enough, high, middle)
        return low, high, jnp.where(enough, reached_middle, reached), step + 1

    def unsettled(state: State) -> Bool[Array, ""]:
        low, high, reached, _ = state
        return (reached > k) & (low + 1 < high)

    state = low, jnp.int32(ABOVE_ALL), reached, jnp.int32(1)
    low, _, reached, step = lax.while_loop(unsettled, bisect, state)
    return number(low), k, reached, step


def bisect_order(
    count_before: Callable[[Int[Array, ""], Int[Array, ""]], Int[Array, ""]],
    end: int,
    k: Int[Array, ""],
    reached: Int[Array, ""],
    step: Int[Array, ""],
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Finds an end in an order before which there are exactly k entries.

    Args:
      count_before: given an end and how many calls there were before, how many entries are before
        it; fewer than k before 1.
      end: an end before which there are enough.
      k: how many to take.
      reached: how many there are before `end`, at least k.
      step: how many calls of `bisect_scores` there were.

    Returns:
      The end; the number of calls by now.
    """

    def bisect(state: State) -> State:  # k entries or more are before `high`, fewer before `low`
        low, high, reached, step = state
        middle = midpoint(low, high)
        before_middle = count_before(middle, step)
        enough = before_middle >= k
        low, high = jnp.where(enough, low, middle), jnp.where(enough, middle, high)
        return low, high, jnp.where(enough, before_middle, reached), step + 1

    def unsettled(state: State) -> Bool[Array, ""]:
        _, _, reached, _ = state
        return reached > k

    state = jnp.int32(1), jnp.int32(end), reached, step
    _, found, _, step = lax.while_loop(unsettled, bisect, state)
    return found, step


def midpoint(low: Int[Array, ""], high: Int[Array, ""]) -> Int[Array, ""]:
    """floor((low + high) / 2) without overflow."""
    return (low & high) + ((low ^ high) >> 1)


def number(ordinal: Int[Array, ""]) -> Float[Array, ""]:
    """The float32 that is `ordinal` steps above 0.0; -0.0 is one step below it."""
    return lax.bitcast_convert_type(ordinal ^ ((ordinal >> 31) & 0x7FFFFFFF), jnp.float32)
