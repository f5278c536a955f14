"""The kernel of `mosaic_sm90.py`; imported only where it is built, since it needs JAX 0.11."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_tiles as tiles
from pallas_kernels.mosaic_tiles import ROWS, Notes, Tiling
from pallas_kernels.verify import sm90_stores as stores


@dataclasses.dataclass
class Logits(Notes):
    """Writes each key's product with the scorer, or the mean over every few keys."""

    tiling: Tiling
    half: Any
    begin: Any  # the part's first tile
    scale: float
    scorer: Any  # shared [8, D]: eight vectors whose sum it is
    out: Any  # [S / summed]
    summed: int  # 1, 8, or 16 keys
    emulated: bool

    @property
    def logits_types(self) -> Sequence[Any]:  # type: ignore[override]
        """The products with the scorer's vectors."""
        return [plgpu.ACC((self.tiling.keys, 8), jnp.float32)]

    def with_logits(self, accumulators: Any, keys: Any) -> None:
        """Multiplies a tile's keys with the scorer's vectors."""
        plgpu.wgmma(accumulators[0], keys, self.scorer.transpose((1, 0)))

    def note(self, products: Any, sums: Any, weights: Any, peak: Any, tile: Any) -> None:
        """Adds up the eight products of each key, and neighbouring keys."""

        @tiles.for_half(self.half, 0)
        def _() -> None:
            logits = products[0].sum(axis=1) * (self.scale / self.summed)
            layout, size = tiles.ROW_VALUES, self.tiling.keys // self.summed
            if self.summed > 1 and self.emulated:
                logits = logits.reshape(-1, self.summed).sum(axis=1)
            elif self.summed > 1:
                logits, layout = stores.sum_runs(logits, self.summed), stores.SUMS[self.summed]
            here = pl.ds((self.begin + tile) * size, size)
            put(logits, self.out.at[here], 0, layout, self.emulated)


@dataclasses.dataclass
class Weights(Notes):
    """Writes the scoring rows' weights, and the running maximum that they are relative to."""

    tiling: Tiling
    half: Any
    begin: Any
    out: Any  # [R, S]
    peaks: Any  # [S / keys, R]
    emulated: bool

    def note(self, products: Any, sums: Any, weights: Any, peak: Any, tile: Any) -> None:
        """Writes a tile's weights and peaks."""
        first, tile = self.half * ROWS, self.begin + tile
        columns = pl.ds(tile * self.tiling.keys, self.tiling.keys)
        out, weights = self.out.at[:, columns], weights.astype(self.out.dtype)
        put(weights, out, first, plgpu.Layout.WGMMA, self.emulated)
        put(peak, self.peaks.at[tile], first, tiles.ROW_VALUES, self.emulated)


@dataclasses.dataclass
class WeightSums(Notes):
    """Writes the log-sum-exp, base 2, of the scoring rows' logits over each few keys."""

    tiling: Tiling
    half: Any
    begin: Any
    summer: Any  # shared [columns, keys]: where its row i is 1, keys go to column i
    out: Any  # [R, S / summed]
    summed: int
    emulated: bool

    @property
    def weights_types(self) -> Sequence[Any]:  # type: ignore[override]
        """The sums."""
        return [plgpu.ACC((ROWS, self.summer.shape[0]), jnp.float32)]

    def with_weights(self, accumulators: Any, weights: Any) -> None:
        """Adds the weights up, as a product with zeros and ones."""
        plgpu.wgmma(accumulators[0], weights, self.summer.transpose((1, 0)))

    def note(self, products: Any, sums: Any, weights: Any, peak: Any, tile: Any) -> None:
        """Writes the sums' logarithms."""
        logs = jnp.log2(sums[0]) + lax.broadcast_in_dim(peak, sums[0].shape, [0])
        columns = self.tiling.keys // self.summed
        out = self.out.at[:, pl.ds((self.begin + tile) * columns, columns)]
        put(logs, out, self.half * ROWS, plgpu.Layout.WGMMA, self.emulated)


def put(values: Any, out: Any, first: Any, layout: Any, emulated: bool) -> None:
    """`sm90_stores.store`, and its twin for the emulation, which cannot run that."""
    if not emulated:
        stores.store(values, out, first, layout)
        return
    for half in range(-(-out.shape[0] // values.shape[0])):
        start = half * values.shape[0]
        rows = min(values.shape[0], out.shape[0] - start)

        @pl.when(first == start)
        def _(start: int = start, rows: int = rows) -> None:
            held = values[tuple(map(slice, (rows, *out.shape[1:])))]
            out.at[pl.ds(start, rows)][...] = held


def build(
    tiling: Tiling,
    parts: int,
    order: tuple[int, ...],
    group: int,
    scale: float,
    window: int | None,
    inputs: dict[str, jax.Array],
    outputs: dict[str, Any],
    interpret: Any,
) -> Any:
    """The kernel for arguments of these shapes; `inputs` and `outputs` give its operands' order."""
    batch, kv_heads = inputs["q"].shape[:2]
    tokens, keys, cache_rows = len(order), tiling.keys, inputs["k"].shape[2]
    emulated = interpret is not None
    names = (*inputs, *outputs)

    def body(*refs: Any, **scratch: Any) -> None:
        ref = dict(zip(names, refs, strict=True))
        b, h, part = (lax.axis_index(name) for name in ("b", "h", "part"))
        warpgroup = lax.axis_index("warpgroup")
        length = ref["lengths"][b]
        first = 0 if window is None else lax.div(jnp.maximum(length + 1 - window, 0), keys)
        last = lax.div(length + (tokens + keys - 1), keys)
        share = lax.div(last - first + (parts - 1), parts)
        begin = first + part * share
        steps = jnp.maximum(jnp.minimum(begin + share, last) - begin, 0)
        whole = 0 if window is not None else jnp.clip(lax.div(length + 1, keys) - begin, 0, steps)

        def visible(tile: Any, half: Any) -> Any:
            shape = (ROWS, keys)
            key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
            key = key + (begin + tile) * keys
            position = length + tiles.tokens_of_rows(order, group, half, shape)
            seen = key <= position
            return seen if window is None else seen & (key > position - window)

        def readable(tile: Any) -> tuple[Any, Any]:
            return 0, length + tokens - (begin + tile) * keys

        @pl.when(warpgroup < tiling.compute_warpgroups)
        def _compute() -> None:
            plgpu.set_max_registers(tiling.compute_registers, action="increase")

            @pl.when(warpgroup == 0)
            def _() -> None:
                tiles.load_queries(tiling, scratch, ref["q"].at[b, h])
                if "logits" in ref:  # the scorer's vectors follow the queries
                    source = ref["q"].at[b, h, pl.ds(tiling.packed, 8)]
                    plgpu.copy_gmem_to_smem(source, scratch["scorer"], scratch["noting_ready"])
                if "summer" in ref:
                    source = ref["summer"]
                    plgpu.copy_gmem_to_smem(source, scratch["summer"], scratch["noting_ready"])

            half = warpgroup if tiling.halves > 1 else 0
            notes = Notes()
            if "noting_ready" in scratch:
                plgpu.barrier_wait(scratch["noting_ready"])
            if "logits" in ref:
                out, scorer = ref["logits"].at[b, h], scratch["scorer"]
                summed = cache_rows // out.shape[0]
                notes = Logits(tiling, half, begin, scale, scorer, out, summed, emulated)
            elif "sums" in ref:
                out, summer = ref["sums"].at[b, h], scratch["summer"]
                summed = cache_rows // out.shape[1]
                notes = WeightSums(tiling, half, begin, summer, out, summed, emulated)
            elif "weights" in ref:
                out, peaks = ref["weights"].at[b, h], ref["peaks"].at[b, h]
                notes = Weights(tiling, half, begin, out, peaks, emulated)
            result = tiles.attend(
                tiling, scratch, warpgroup, steps, whole, visible, readable, scale, notes
            )
            outs = ref["out"].at[b, h, part], ref["lse"].at[b, h, part]
            tiles.write(tiling, scratch, warpgroup, result, *outs)

        @pl.when(warpgroup == tiling.compute_warpgroups)
        def _memory() -> None:
            plgpu.set_max_registers(tiling.memory_registers, action="decrease")
            slot = ref["slots"][b] if "slots" in ref else b

            def load(tile: Any, stage: Any, _: Any) -> None:
                here = (slot, h, pl.ds((begin + tile) * keys, keys))
                for x in ("k", "v"):
                    ready = scratch[f"{x}_ready"].at[stage]
                    plgpu.copy_gmem_to_smem(ref[x].at[here], scratch[x].at[stage], ready)

            tiles.fill(tiling, scratch, steps, load)

    scratch = tiling.scratch()
    if "logits" in outputs:
        scratch["scorer"] = tiles.shared((8, tiling.head_dim), tiling.dtype)
    if "summer" in inputs:
        scratch["summer"] = tiles.shared(inputs["summer"].shape, tiling.dtype)
    if "logits" in outputs or "summer" in inputs:
        scratch["noting_ready"] = plgpu.Barrier()
    return plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=scratch,
        grid=(kv_heads, parts, batch),
        grid_names=("h", "part", "b"),
        num_threads=tiling.compute_warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
