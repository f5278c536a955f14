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


@dataclasses.dataclass
class Logits(Notes):
    """Writes each key's product with the scorer."""

    tiling: Tiling
    half: Any
    begin: Any  # the part's first tile
    scale: float
    scorer: Any  # shared [8, D]: eight vectors whose sum it is
    staged: Any  # shared [keys]
    out: Any  # [S]

    @property
    def logits_types(self) -> Sequence[Any]:  # type: ignore[override]
        """The products with the scorer's vectors."""
        return [plgpu.ACC((self.tiling.keys, 8), jnp.float32)]

    def with_logits(self, accumulators: Any, keys: Any) -> None:
        """Multiplies a tile's keys with the scorer's vectors."""
        plgpu.wgmma(accumulators[0], keys, self.scorer.transpose((1, 0)))

    def after_logits(self, results: Any, tile: Any) -> None:
        """Adds up the eight products of each key."""

        @tiles.for_half(self.half, 0)
        def _() -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.staged[...] = results[0].sum(axis=1) * self.scale
            plgpu.commit_smem()
            here = pl.ds((self.begin + tile) * self.tiling.keys, self.tiling.keys)
            plgpu.copy_smem_to_gmem(self.staged, self.out.at[here])


@dataclasses.dataclass
class Weights(Notes):
    """Writes the scoring rows' weights, and the running maximum that they are relative to."""

    tiling: Tiling
    half: Any
    begin: Any
    staged: Any  # shared [ROWS, keys]
    staged_peaks: Any  # shared [ROWS]
    out: Any  # [R, S]
    peaks: Any  # [S / keys, R]

    def after_values(self, results: Any, weights: Any, peak: Any, tile: Any) -> None:
        """Copies a tile's weights out, by way of shared memory."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.staged[...] = weights.astype(self.staged.dtype)
        self.staged_peaks[...] = peak
        plgpu.commit_smem()
        tile = self.begin + tile
        columns = pl.ds(tile * self.tiling.keys, self.tiling.keys)
        for which, rows in enumerate(self.tiling.rows_of_halves(self.out.shape[0])):

            @tiles.for_half(self.half, which)
            def _(which: int = which, rows: int = rows) -> None:
                there, here = pl.ds(which * ROWS, rows), pl.ds(0, rows)
                plgpu.copy_smem_to_gmem(self.staged.at[here], self.out.at[there, columns])
                plgpu.copy_smem_to_gmem(self.staged_peaks.at[here], self.peaks.at[tile, there])


@dataclasses.dataclass
class WeightSums(Notes):
    """Writes the log-sum-exp, base 2, of the scoring rows' logits over each few keys."""

    tiling: Tiling
    half: Any
    begin: Any
    summer: Any  # shared [columns, keys]: where its row i is 1, keys go to column i
    staged: Any  # shared [ROWS, columns]
    out: Any  # [R, S / keys * columns]
    columns: int

    @property
    def values_types(self) -> Sequence[Any]:  # type: ignore[override]
        """The sums."""
        return [plgpu.ACC((ROWS, self.columns), jnp.float32)]

    def with_values(self, accumulators: Any, weights: Any) -> None:
        """Adds the weights up, as a product with zeros and ones."""
        plgpu.wgmma(accumulators[0], weights, self.summer.transpose((1, 0)))

    def after_values(self, results: Any, weights: Any, peak: Any, tile: Any) -> None:
        """Copies the sums' logarithms out."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        sums = results[0]
        self.staged[...] = jnp.log2(sums) + lax.broadcast_in_dim(peak, sums.shape, [0])
        plgpu.commit_smem()
        columns = pl.ds((self.begin + tile) * self.columns, self.columns)
        for which, rows in enumerate(self.tiling.rows_of_halves(self.out.shape[0])):

            @tiles.for_half(self.half, which)
            def _(which: int = which, rows: int = rows) -> None:
                there, here = pl.ds(which * ROWS, rows), pl.ds(0, rows)
                plgpu.copy_smem_to_gmem(self.staged.at[here], self.out.at[there, columns])


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
    tokens, keys = len(order), tiling.keys
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
                if "scorer" in ref:
                    source = ref["scorer"].at[b, h]
                    plgpu.copy_gmem_to_smem(source, scratch["scorer"], scratch["noting_ready"])
                if "summer" in ref:
                    source = ref["summer"]
                    plgpu.copy_gmem_to_smem(source, scratch["summer"], scratch["noting_ready"])

            half = warpgroup if tiling.halves > 1 else 0
            notes = Notes()
            if "scorer" in ref or "summer" in ref:
                plgpu.barrier_wait(scratch["noting_ready"])
            if "logits" in ref:
                out, staged = ref["logits"].at[b, h], scratch["staged"].at[warpgroup]
                notes = Logits(tiling, half, begin, scale, scratch["scorer"], staged, out)
            elif "sums" in ref:
                out, staged = ref["sums"].at[b, h], scratch["staged"].at[warpgroup]
                columns = inputs["summer"].shape[0]
                notes = WeightSums(tiling, half, begin, scratch["summer"], staged, out, columns)
            elif "weights" in ref:
                out, staged = ref["weights"].at[b, h], scratch["staged"].at[warpgroup]
                staged_peaks, peaks = scratch["peaks"].at[warpgroup], ref["peaks"].at[b, h]
                notes = Weights(tiling, half, begin, staged, staged_peaks, out, peaks)
            result = tiles.attend(
                tiling, scratch, warpgroup, steps, whole, visible, readable, scale, notes
            )
            outs = ref["out"].at[b, h, part], ref["lse"].at[b, h, part]
            tiles.write(tiling, scratch, warpgroup, result, *outs)

        @pl.when(warpgroup == tiling.compute_warpgroups)
        def _memory() -> None:
            plgpu.set_max_registers(tiling.memory_registers, action="decrease")
            slot = ref["slots"][b]

            def load(tile: Any, stage: Any, _: Any) -> None:
                here = (slot, h, pl.ds((begin + tile) * keys, keys))
                for x in ("k", "v"):
                    ready = scratch[f"{x}_ready"].at[stage]
                    plgpu.copy_gmem_to_smem(ref[x].at[here], scratch[x].at[stage], ready)

            tiles.fill(tiling, scratch, steps, load)

    scratch = tiling.scratch()
    if "logits" in outputs:
        scratch["scorer"] = tiles.shared((8, tiling.head_dim), tiling.dtype)
        scratch["staged"] = plgpu.SMEM((tiling.compute_warpgroups, keys), jnp.float32)
    if "sums" in outputs:
        columns = inputs["summer"].shape[0]
        scratch["summer"] = tiles.shared((columns, keys), tiling.dtype)
        shape = (tiling.compute_warpgroups, ROWS, columns)
        scratch["staged"] = plgpu.SMEM(shape, jnp.float32)
    if "weights" in outputs:
        shape = (tiling.compute_warpgroups, ROWS, keys)
        scratch["staged"] = tiles.shared(shape, outputs["weights"].dtype)
        scratch["peaks"] = plgpu.SMEM((tiling.compute_warpgroups, ROWS), jnp.float32)
    if "scorer" in inputs or "summer" in inputs:
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
