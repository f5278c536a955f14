"""Gathering single cache rows into a tile, which Pallas has no words for on Hopper.

Every thread of the memory warpgroup copies pieces of 16 bytes with `cp.async`, to where the copy
engine would have put them: rows of 128 bytes in tiles of 8, their pieces permuted by the row.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm, vector
from jaxtyping import Array, Int

THREADS = 128
PIECE = 16  # bytes
SCALAR = plgpu.Layout.WG_SPLAT
REF = plgpu.RefType()


def look_up(
    listed: jax.Ref,
    first_entry: Int[Array, ""],
    last_entry: Int[Array, ""],
    *,
    rows: int,
    head_dim: int,
) -> Int[Array, " n"]:
    """Reads the list for a tile: what `gather` wants to know, each thread its own rows.

    Args:
      listed: all lists, flat, in global memory.
      first_entry: entry of `listed` for the tile's row 0.
      last_entry: entries after this one are read as if they were this one.
      rows: of the tile.
      head_dim: D.
    """
    shape = (THREADS * len(_rows_of_thread(rows, head_dim)),)

    @plgpu.inline_mgpu(
        arg_types=(REF, SCALAR, SCALAR),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=_layout(shape)),
    )
    def inline(_: Any, listed: ir.Value, first_entry: Any, last_entry: Any) -> Any:
        first_entry, last_entry = first_entry.registers.item(), last_entry.registers.item()
        layout = _layout(shape).to_mgpu()
        kind = layout.registers_element_type(_i32_type())
        first, _, _ = _place(head_dim)
        found = np.empty(layout.registers_shape(shape), dtype=object)
        for i, ahead in enumerate(_rows_of_thread(rows, head_dim)):
            entry = arith.addi(first_entry, arith.addi(first, _i32(ahead)))
            entry = arith.index_cast(ir.IndexType.get(), arith.minsi(entry, last_entry))
            found.flat[i] = vector.from_elements(kind, [memref.load(listed, [entry])])
        return FragmentedArray(_registers=found, _layout=layout, _is_signed=True)

    return inline(listed, first_entry, last_entry)


def gather(
    sources: tuple[jax.Ref, jax.Ref],
    tiles: tuple[jax.Ref, jax.Ref],
    found: Int[Array, " n"],
    first_row: Int[Array, ""],
    run: Int[Array, ""],
    *,
    rows: int,
    head_dim: int,
) -> None:
    """Starts copying `rows` rows of both sources, as one group of `cp.async`.

    Args:
      sources: [all rows, D] in global memory, of 16 bits.
      tiles: [rows, D] in shared memory, in the tensor cores' layout.
      found: the rows, as `look_up` gives them.
      first_row: row of the sources that the numbers below count from.
      run: if not negative, no list counts: row i of the tile is row run + i.
      rows: of the tile.
      head_dim: D.
    """
    swizzled = plgpu.RefType((plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))
    types = (REF, REF, swizzled, swizzled, _layout(found.shape), SCALAR, SCALAR)

    @plgpu.inline_mgpu(arg_types=types)
    def inline(
        _: Any,
        keys: ir.Value,
        values: ir.Value,
        key_tile: ir.Value,
        value_tile: ir.Value,
        found: Any,
        first_row: Any,
        run: Any,
    ) -> None:
        first_row, run = first_row.registers.item(), run.registers.item()
        is_run = arith.cmpi(arith.CmpIPredicate.sge, run, _i32(0))
        first, column_tile, column = _place(head_dim)
        for ahead, name in zip(_rows_of_thread(rows, head_dim), found.registers.flat, strict=True):
            row = arith.addi(first, _i32(ahead))
            listed_row = vector.extract(name, [], [0])
            source_row = arith.select(is_run, arith.addi(run, row), listed_row)
            source_row = _i64(arith.addi(first_row, source_row))
            piece = arith.addi(arith.muli(column_tile, _i32(8)), column)
            offset = arith.addi(
                arith.muli(source_row, utils.c(head_dim, _i64_type())),
                _i64(arith.muli(piece, _i32(8))),
            )
            # Tiles of 8 rows and 64 columns, row by row; in each, rows of 8 pieces.
            row_tile, row_in_tile = arith.divui(row, _i32(8)), arith.remui(row, _i32(8))
            tile = arith.addi(arith.muli(row_tile, _i32(head_dim // 64)), column_tile)
            place = arith.addi(arith.muli(tile, _i32(64)), arith.muli(row_in_tile, _i32(8)))
            place = arith.addi(place, arith.xori(column, row_in_tile))
            target = arith.muli(place, _i32(8))
            for source, held in ((keys, key_tile), (values, value_tile)):
                pointer = llvm.addrspacecast(
                    llvm.PointerType.get(address_space=1), utils.memref_ptr(source)
                )
                nvvm.cp_async_shared_global(
                    utils.getelementptr(utils.memref_ptr(held), [target], _i16_type()),
                    utils.getelementptr(pointer, [offset], _i16_type()),
                    PIECE,
                    nvvm.LoadCacheModifierKind.CG,
                )
        nvvm.cp_async_commit_group()

    inline(*sources, *tiles, found, first_row, run)


def wait(groups: int) -> None:
    """Waits until all but the last so many groups have arrived, for the tensor cores to see."""

    @plgpu.inline_mgpu()
    def inline(_: Any) -> None:
        nvvm.cp_async_wait_group(groups)
        utils.commit_shared()

    inline()


def _rows_of_thread(rows: int, head_dim: int) -> range:
    """How far a thread's rows of a tile are from its first one."""
    return range(0, rows, THREADS * PIECE // (2 * head_dim))


def _place(head_dim: int) -> tuple[ir.Value, ir.Value, ir.Value]:
    """A thread's first row in a tile; of its piece, the tile of 64 columns and the place there."""
    pieces = 2 * head_dim // PIECE  # of a row
    thread = arith.remui(utils.thread_idx(), _i32(THREADS))
    first, piece = arith.divui(thread, _i32(pieces)), arith.remui(thread, _i32(pieces))
    return first, arith.divui(piece, _i32(8)), arith.remui(piece, _i32(8))


def _layout(shape: tuple[int, ...]) -> Any:
    """Of one number a thread and register."""
    return plgpu.Layout.WG_STRIDED(shape, vec_size=1)


def _i16_type() -> ir.Type:
    return ir.IntegerType.get_signless(16)


def _i32_type() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _i64_type() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def _i32(value: int) -> ir.Value:
    return utils.c(value, _i32_type())


def _i64(value: ir.Value) -> ir.Value:
    return arith.extui(_i64_type(), value)
