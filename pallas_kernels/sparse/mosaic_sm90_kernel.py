"""The kernel of `mosaic_sm90.py`; imported only where it is built, since it needs JAX 0.11."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_tiles as tiles
from pallas_kernels.mosaic_tiles import ROWS, Notes, Tiling
from pallas_kernels.sparse.sm90_gather import gather, look_up, wait

ALIGNED = 8  # rows: the copy engine's tiles begin at a multiple of this


def build(
    tiling: Tiling,
    parts: int,
    order: tuple[int, ...],
    group: int,
    scale: float,
    block_size: int,
    cache_shape: tuple[int, ...],
    list_shape: tuple[int, ...],
    out_shapes: list[Any],
    by_threads: bool,
    interpret: Any,
) -> Any:
    """The kernel for arguments of these shapes."""
    batch, kv_heads, cache_rows, _ = cache_shape
    _, lists, most_entries = list_shape
    keys, tokens = tiling.keys, len(order)
    entries = keys // block_size  # of a tile
    lag = tiling.stages - 1  # tiles on their way when the oldest is announced

    def body(*refs: Any, **scratch: Any) -> None:
        q, k, v, blocks, counts, lengths, tail_starts, out, lse = refs
        b, h, part = (lax.axis_index(name) for name in ("b", "h", "part"))
        warpgroup = lax.axis_index("warpgroup")
        count, length, tail_start = counts[b], lengths[b], tail_starts[b]
        # Tiles of the list; then those of the tail.
        listed = lax.div(count + (entries - 1), entries)
        tail_base = lax.div(tail_start, ALIGNED) * ALIGNED
        all_tiles = listed + lax.div(length + tokens - tail_base + (keys - 1), keys)
        share = lax.div(all_tiles + (parts - 1), parts)
        begin = part * share
        steps = jnp.maximum(jnp.minimum(begin + share, all_tiles) - begin, 0)
        whole = jnp.clip(lax.div(count, entries) - begin, 0, steps)

        def tail(tile: Any) -> tuple[Any, Any]:
            """The cache row that a tile of the tail begins at, and the first that it is to add."""
            first = tail_base + (begin + tile - listed) * keys
            start = jnp.clip(first, 0, cache_rows - keys)  # the last tile may reach back
            return start, jnp.maximum(first, tail_start)

        def bounds(tile: Any) -> tuple[Any, Any, Any]:
            """First key of a tile that counts, end of those, and by how much a later token's is."""
            is_listed = begin + tile < listed
            start, first = tail(tile)
            low = jnp.where(is_listed, 0, first - start)
            list_end = count * block_size - (begin + tile) * keys
            end = jnp.where(is_listed, list_end, length + 1 - start)
            return low, end, jnp.where(is_listed, 0, 1)

        def visible(tile: Any, half: Any) -> Any:
            shape = (ROWS, keys)
            key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
            low, end, later = bounds(tile)
            token = tiles.tokens_of_rows(order, group, half, shape)
            return (key >= low) & (key < end + later * token)

        def readable(tile: Any) -> tuple[Any, Any]:
            low, end, later = bounds(tile)
            return low, end + later * (tokens - 1)

        @pl.when(warpgroup < tiling.compute_warpgroups)
        def _compute() -> None:
            plgpu.set_max_registers(tiling.compute_registers, action="increase")

            @pl.when(warpgroup == 0)
            def _() -> None:
                tiles.load_queries(tiling, scratch, q.at[b, h])

            result = tiles.attend(
                tiling, scratch, warpgroup, steps, whole, visible, readable, scale, Notes()
            )
            tiles.write(tiling, scratch, warpgroup, result, out.at[b, h, part], lse.at[b, h, part])

        def row_of(tile: Any, entry: int) -> Any:
            """The cache row that an entry of a tile begins at; negative if nothing sees it."""
            place = (begin + tile) * entries + entry
            block = blocks[b, h if lists > 1 else 0, jnp.minimum(place, most_entries - 1)]
            start, first = tail(tile)
            row = start + entry * block_size
            is_seen = (row + block_size > first) & (row < length + tokens)
            is_listed = place < count
            return jnp.where(
                begin + tile < listed,
                jnp.where(is_listed, block * block_size, -1),
                jnp.where(is_seen, row, -1),
            )

        def aligned(row: Any) -> Any:
            return row if block_size < ALIGNED else pl.multiple_of(row, ALIGNED)

        def rows_of(tile: Any) -> list[Any]:
            return [row_of(tile, entry) for entry in range(entries)]

        def copy_blocks(tile: Any, stage: Any, rows: list[Any]) -> None:
            for entry, row in enumerate(rows):
                held = pl.ds(entry * block_size, block_size)

                @pl.when(row >= 0)
                def _(held: Any = held, row: Any = row) -> None:
                    for source, name in ((k, "k"), (v, "v")):
                        plgpu.copy_gmem_to_smem(
                            source.at[b, h, pl.ds(aligned(row), block_size)],
                            scratch[name].at[stage, held],
                            scratch[f"{name}_ready"].at[stage],
                        )

                @pl.when(row < 0)
                def _() -> None:
                    for name in ("k_ready", "v_ready"):
                        plgpu.barrier_arrive(scratch[name].at[stage])

        of_list = (b * lists + (h if lists > 1 else 0)) * most_entries
        sizes = {"rows": keys, "head_dim": tiling.head_dim}

        def find_rows(tile: Any) -> Any:
            first_entry = of_list + (begin + tile) * keys
            last_entry = of_list + jnp.maximum(count - 1, 0)
            return look_up(blocks, first_entry, last_entry, **sizes)

        def gather_rows(tile: Any, stage: Any, found: Any) -> None:
            held = scratch["k"].at[stage], scratch["v"].at[stage]
            run = jnp.where(begin + tile < listed, -1, tail(tile)[0])
            gather((k, v), held, found, (b * kv_heads + h) * cache_rows, run, **sizes)

            @pl.when(tile >= lag)
            def _announce_oldest() -> None:
                wait(lag)
                announce(tile - lag)

        def finish_gathering() -> None:
            wait(0)
            pl.loop(jnp.maximum(steps - lag, 0), steps)(announce)

        def announce(tile: Any) -> None:
            for name in ("k_ready", "v_ready"):
                plgpu.barrier_arrive(scratch[name].at[lax.rem(tile, tiling.stages)])

        @pl.when(warpgroup == tiling.compute_warpgroups)
        def _memory() -> None:
            plgpu.set_max_registers(tiling.memory_registers, action="decrease")
            if not by_threads:
                tiles.fill(tiling, scratch, steps, copy_blocks, rows_of)
                return
            tiles.fill(tiling, scratch, steps, gather_rows, find_rows, finish_gathering)

    return plgpu.kernel(
        body,
        out_type=out_shapes,
        scratch_types=tiling.scratch(),
        grid=(kv_heads, parts, batch),
        grid_names=("h", "part", "b"),
        num_threads=tiling.compute_warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
