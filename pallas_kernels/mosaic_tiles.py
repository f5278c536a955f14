"""What the Hopper attention kernels share: online softmax over tiles of keys in shared memory.

A memory warpgroup, which each kernel writes for itself, copies tiles of keys and values to shared
memory; compute warpgroups attend to them. Up to 64 packed rows of queries are one half; with one
half the compute warpgroups take turns at the tiles, so that the softmax of one tile hides behind
the products of another; with two halves each has its own, and both use every tile.

Imported only where a kernel is built: the module needs JAX 0.11.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.splits import LOG2_E

REGISTERS = 65536  # of a processor
ROWS = 64  # rows of queries that the tensor cores take at a time
ROW_VALUES = plgpu.Layout.WGMMA.reduce(1)  # registers' layout of one number a row
LOWEST = float(jnp.finfo(jnp.float32).min)  # finite, so that rows without keys make no NaN


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Sizes of a kernel's tiles.

    Attributes:
      packed: rows of queries, a multiple of 8.
      head_dim: D.
      dtype: of queries, keys and values.
      keys: keys of a tile.
      stages: tiles in flight.
      turns: compute warpgroups that take turns at the tiles.
      arrivals: copies that fill a tile of keys, or of values.
      memory_registers: of a thread of the memory warpgroup.
    """

    packed: int
    head_dim: int
    dtype: Any
    keys: int
    stages: int
    turns: int
    arrivals: int = 1
    memory_registers: int = 40

    def __post_init__(self) -> None:
        # A warpgroup counts a barrier's phases by its own waits, so that each stage must always
        # fall to the same one.
        assert self.stages % self.turns == 0, self
        assert self.halves == 1 or self.turns == 1, self

    @property
    def halves(self) -> int:
        """Sets of at most 64 rows."""
        return -(-self.packed // ROWS)

    @property
    def compute_warpgroups(self) -> int:
        """All but the memory warpgroup."""
        return self.halves * self.turns

    @property
    def compute_registers(self) -> int:
        """Of a thread of a compute warpgroup, at most 240.

        A kernel begins with as many for each thread as divide the processor's evenly, in eights. A
        warpgroup that asks for more than the others have given up waits for ever.
        """
        warpgroups = self.compute_warpgroups + 1
        at_start = min(240, REGISTERS // (128 * warpgroups) // 8 * 8) * warpgroups
        share = (at_start - self.memory_registers) // self.compute_warpgroups
        return min(240, share // 8 * 8)

    def rows_of_halves(self, rows: int) -> list[int]:
        """How many of the first `rows` packed rows each half holds."""
        return [min(ROWS, rows - first) for first in range(0, rows, ROWS)]

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers."""
        tile = (self.stages, self.keys, self.head_dim)
        halves = (self.halves, ROWS)
        return {
            "q": shared((*halves, self.head_dim), self.dtype),
            "k": shared(tile, self.dtype),
            "v": shared(tile, self.dtype),
            "p": shared((self.compute_warpgroups, ROWS, self.keys), self.dtype),
            "out": shared((*halves, self.head_dim), jnp.float32),
            "lse": plgpu.SMEM(halves, jnp.float32),
            "total": plgpu.SMEM((ROWS,), jnp.float32),
            "q_ready": plgpu.Barrier(num_arrivals=self.halves),
            "k_ready": plgpu.Barrier(num_barriers=self.stages, num_arrivals=self.arrivals),
            "v_ready": plgpu.Barrier(num_barriers=self.stages, num_arrivals=self.arrivals),
            "free": plgpu.Barrier(num_barriers=self.stages, num_arrivals=self.halves),
            "cleared": plgpu.Barrier(),
            "handed_over": plgpu.Barrier(num_barriers=max(1, self.turns - 1)),
        }


class Notes:
    """What a kernel notes down of the tiles that it goes through: here, nothing.

    `with_logits` and `with_weights` start products of the tensor cores with a tile's keys and with
    its weights exp2(logits - peak), into accumulators that they ask for by `logits_types` and
    `weights_types`. `note` gets the results while the weighted values are being made.
    """

    logits_types: Sequence[Any] = ()
    weights_types: Sequence[Any] = ()

    def with_logits(self, accumulators: Any, keys: Any) -> None:
        """Starts products with a tile's keys."""

    def with_weights(self, accumulators: Any, weights: Any) -> None:
        """Starts products with a tile's weights."""

    def note(self, products: Any, sums: Any, weights: Any, peak: Any, tile: Any) -> None:
        """Gets the products with the keys and with the weights, the weights, and the peaks."""


def shared(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the tensor cores' layout, rows of 128 bytes swizzled."""
    columns = 128 * 8 // jnp.finfo(dtype).bits
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def load_queries(tiling: Tiling, scratch: Any, q: Any) -> None:
    """Starts copying the packed rows q [R, D] to shared memory."""
    for half, rows in enumerate(tiling.rows_of_halves(tiling.packed)):
        plgpu.copy_gmem_to_smem(
            q.at[pl.ds(half * ROWS, rows)],
            scratch["q"].at[half, pl.ds(0, rows)],
            scratch["q_ready"],
        )


def fill(
    tiling: Tiling,
    scratch: Any,
    steps: Any,
    load: Callable[[Any, Any, Any], None],
    look_up: Callable[[Any], Any] = lambda tile: (),
    finish: Callable[[], None] = lambda: None,
) -> None:
    """The memory warpgroup's loop.

    `load(i, stage, look_up(i))` starts the copies of tile i; what `look_up` reads is read one tile
    ahead, since reading takes long. `finish` is called after the last tile.
    """

    def step(i: Any, found: Any) -> Any:
        found_next = look_up(i + 1)
        stage = lax.rem(i, tiling.stages)

        @pl.when(i >= tiling.stages)
        def _() -> None:
            plgpu.barrier_wait(scratch["free"].at[stage])

        load(i, stage, found)
        return found_next

    lax.fori_loop(0, steps, step, look_up(0))
    finish()

    @pl.loop(jnp.maximum(steps - tiling.stages, 0), steps)
    def _drain(i: Any) -> None:  # so that no arrival is left without a wait
        plgpu.barrier_wait(scratch["free"].at[lax.rem(i, tiling.stages)])


def attend(
    tiling: Tiling,
    scratch: Any,
    warpgroup: Any,
    steps: Any,
    whole: Any,
    visible: Callable[[Any, Any], Any],
    readable: Callable[[Any], tuple[Any, Any]],
    scale: float,
    notes: Notes,
) -> tuple[Any, Any, Any]:
    """The compute warpgroups' loop over tiles 0 .. steps-1.

    Args:
      tiling: sizes.
      scratch: as `Tiling.scratch` describes it.
      warpgroup: index of the compute warpgroup.
      steps: how many tiles there are.
      whole: how many of them, the first ones, all rows see whole.
      visible: for a tile and a half, which keys each row sees, [ROWS, keys].
      readable: for a tile, its first and its last key, exclusive, that some row sees: values
        outside are cleared, since 0 * NaN is NaN.
      scale: factor on q.k.
      notes: what to note down.

    Returns:
      Of this warpgroup's share: unnormalised values [ROWS, D], the rows' largest logit (base 2),
      and the sum of their weights relative to it.
    """
    half, turn = _place(tiling, warpgroup)
    queries, staged = scratch["q"].at[half], scratch["p"].at[warpgroup]
    logits_shape, values_shape = (ROWS, tiling.keys), (ROWS, tiling.head_dim)
    plgpu.barrier_wait(scratch["q_ready"])

    def step(masked: bool, count: Any, carry: Any) -> Any:
        values_sum, peak, total = carry
        tile = turn + tiling.turns * count
        stage = lax.rem(tile, tiling.stages)
        keys, values = scratch["k"].at[stage], scratch["v"].at[stage]

        def multiply_keys(logits: Any, *extra: Any) -> Any:
            notes.with_logits(extra, keys)
            plgpu.wgmma(logits, queries, keys.transpose((1, 0)))
            return logits[...], [x[...] for x in extra]

        plgpu.barrier_wait(scratch["k_ready"].at[stage])
        accumulators = (plgpu.ACC(logits_shape, jnp.float32), *notes.logits_types)
        logits, key_products = pl.run_scoped(multiply_keys, *accumulators)
        logits = logits * (scale * LOG2_E)
        if masked:
            logits = jnp.where(visible(tile, half), logits, -jnp.inf)
        new_peak = jnp.maximum(peak, logits.max(axis=1))
        decay = jnp.exp2(peak - new_peak)
        weights = jnp.exp2(logits - lax.broadcast_in_dim(new_peak, logits_shape, [0]))
        total = total * decay + weights.sum(axis=1)
        staged[...] = weights.astype(tiling.dtype)
        plgpu.commit_smem()
        plgpu.barrier_wait(scratch["v_ready"].at[stage])
        if masked:
            _clear(tiling, scratch, values, readable(tile), half)

        def multiply_values(products: Any, *extra: Any) -> Any:
            notes.with_weights(extra, staged)
            plgpu.wgmma(products, staged, values)
            # Of the products in flight, those of the notes are done before those of the values.
            sums = [plgpu.wgmma_accumulator_load(x, wait_n=1) for x in extra]
            notes.note(key_products, sums, weights, new_peak, tile)
            return products[...]

        accumulators = (plgpu.ACC(values_shape, jnp.float32), *notes.weights_types)
        products = pl.run_scoped(multiply_values, *accumulators)
        plgpu.barrier_arrive(scratch["free"].at[stage])
        values_sum = values_sum * lax.broadcast_in_dim(decay, values_shape, [0]) + products
        return values_sum, new_peak, total

    carry = (
        plgpu.layout_cast(jnp.zeros(values_shape, jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), ROW_VALUES),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW_VALUES),
    )
    mine = lax.div(steps - turn + (tiling.turns - 1), tiling.turns)
    mine_whole = lax.div(whole - turn + (tiling.turns - 1), tiling.turns)
    carry = lax.fori_loop(0, mine_whole, functools.partial(step, False), carry)
    return lax.fori_loop(mine_whole, mine, functools.partial(step, True), carry)


def write(
    tiling: Tiling, scratch: Any, warpgroup: Any, share: tuple[Any, Any, Any], out: Any, lse: Any
) -> None:
    """Joins the warpgroups' shares and writes out [R, D], normalised, and lse [R], base 2."""
    half, turn = _place(tiling, warpgroup)
    held_out, held_lse, held_total = (
        scratch["out"].at[half],
        scratch["lse"].at[half],
        scratch["total"],
    )
    spread = functools.partial(
        lax.broadcast_in_dim, shape=(ROWS, tiling.head_dim), broadcast_dimensions=[0]
    )

    def take_over(share: Any) -> Any:
        values, peak, total = share
        other_values = plgpu.load(held_out, layout=plgpu.Layout.WGMMA)
        other_peak = plgpu.load(held_lse, layout=ROW_VALUES)
        other_total = plgpu.load(held_total, layout=ROW_VALUES)
        top = jnp.maximum(peak, other_peak)
        decay, other_decay = jnp.exp2(peak - top), jnp.exp2(other_peak - top)
        values = values * spread(decay) + other_values * spread(other_decay)
        return values, top, total * decay + other_total * other_decay

    def hand_over(share: Any, to: int) -> None:
        held_out[...], held_lse[...], held_total[...] = share
        plgpu.barrier_arrive(scratch["handed_over"].at[to])

    def finish(share: Any) -> None:
        values, peak, total = share
        total = jnp.maximum(total, float(jnp.finfo(jnp.float32).tiny))
        held_out[...] = values / spread(total)
        held_lse[...] = peak + jnp.log2(total)
        plgpu.commit_smem()
        for which, rows in enumerate(tiling.rows_of_halves(tiling.packed)):

            @for_half(half, which)
            def _(which: int = which, rows: int = rows) -> None:
                there, here = pl.ds(which * ROWS, rows), pl.ds(0, rows)
                plgpu.copy_smem_to_gmem(held_out.at[here], out.at[there])
                plgpu.copy_smem_to_gmem(held_lse.at[here], lse.at[there])

    # The last warpgroup hands its share to the one before it, and so on to the first.
    for which in reversed(range(tiling.turns)):

        @for_half(turn, which)
        def _(which: int = which) -> None:
            joined = share
            if which < tiling.turns - 1:
                plgpu.barrier_wait(scratch["handed_over"].at[which])
                joined = take_over(share)
            if which > 0:
                hand_over(joined, which - 1)
            else:
                finish(joined)

    plgpu.wait_smem_to_gmem(0)


def tokens_of_rows(order: tuple[int, ...], group: int, half: Any, shape: tuple[int, int]) -> Any:
    """The query token of each row of a half, [ROWS, ...]; `order` as in `splits.token_order`."""
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    entry = lax.div(row + half * ROWS, group)
    token = entry + order[0]
    for i in range(1, len(order)):
        if order[i] != order[i - 1] + 1:  # a new run of tokens
            token = jnp.where(entry >= i, entry + (order[i] - i), token)
    return token


def for_half(half: Any, which: int) -> Callable[[Callable[[], None]], None]:
    """Like `pl.when(half == which)`, with no branch where the half is known."""
    if isinstance(half, int):
        return lambda do: do() if half == which else None
    return pl.when(half == which)


def _place(tiling: Tiling, warpgroup: Any) -> tuple[Any, Any]:
    """A compute warpgroup's half and turn."""
    return (
        warpgroup if tiling.halves > 1 else 0,
        warpgroup if tiling.turns > 1 else 0,
    )


def _clear(tiling: Tiling, scratch: Any, values: Any, readable: tuple[Any, Any], half: Any) -> None:
    """Zeroes a tile's values outside the readable rows; where both halves use it, once."""

    @for_half(half, 0)
    def _() -> None:
        shape = (tiling.keys, tiling.head_dim)
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        held = values[...]
        first, end = readable
        values[...] = jnp.where((row >= first) & (row < end), held, jnp.zeros_like(held))
        plgpu.commit_smem()

    if tiling.halves > 1:
        for_half(half, 0)(lambda: plgpu.barrier_arrive(scratch["cleared"]))
        for_half(half, 1)(lambda: plgpu.barrier_wait(scratch["cleared"]))
