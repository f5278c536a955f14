"""Gathering single cache rows into a tile, which Pallas has no words for on Hopper.

Every thread of the memory warpgroup copies pieces of 16 bytes with `cp.async`, to where the copy
engine would have put them: rows of 128 bytes in tiles of 8, their pieces permuted by the row.
"""

from typing import Any

import jax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm
from jaxtyping import Array, Int

THREADS = 128
PIECE = 16  # bytes
SCALAR = plgpu.Layout.WG_SPLAT
REF = plgpu.RefType()


def gather(
    sources: tuple[jax.Ref, jax.Ref],
    tiles: tuple[jax.Ref, jax.Ref],
    listed: jax.Ref,
    first_row: Int[Array, ""],
    first_entry: Int[Array, ""],
    last_entry: Int[Array, ""],
    run: Int[Array, ""],
    *,
    rows: int,
    head_dim: int,
) -> None:
    """Starts copying `rows` rows of both sources, as one group of `cp.async`.

    Args:
      sources: [all rows, D] in global memory, of 16 bits.
      tiles: [rows, D] in shared memory, in the tensor cores' layout.
      listed: all lists, flat, in global memory.
      first_row: row of the sources that the numbers below count from.
      first_entry: entry of `listed` for the tile's row 0.
      last_entry: entries after this one are read as if they were this one.
      run: if not negative, no list is read: row i of the tile is row run + i.
    """
    swizzled = plgpu.RefType((plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))
    types = (REF, REF, swizzled, swizzled, REF, SCALAR, SCALAR, SCALAR, SCALAR)

    @plgpu.inline_mgpu(arg_types=types)
    def inline(_: Any, *operands: Any) -> None:
        pointers, numbers = operands[:5], [x.registers.item() for x in operands[5:]]
        keys, values, key_tile, value_tile, listed = pointers
        first_row, first_entry, last_entry, run = numbers
        pieces = head_dim * 2 // PIECE  # of a row
        in_pass = THREADS // pieces  # rows
        thread = arith.remui(utils.thread_idx(), _i32(THREADS))
        piece, first = arith.remui(thread, _i32(pieces)), arith.divui(thread, _i32(pieces))
        column_tile, column = arith.divui(piece, _i32(8)), arith.remui(piece, _i32(8))
        is_run = arith.cmpi(arith.CmpIPredicate.sge, run, _i32(0))
        at = [arith.addi(first, _i32(i * in_pass)) for i in range(rows // in_pass)]
        entries = [arith.minsi(arith.addi(first_entry, row), last_entry) for row in at]
        # All reads of the list before any copy, so that they wait for one another but once.
        named = [memref.load(listed, [arith.index_cast(_index(), entry)]) for entry in entries]
        for row, name in zip(at, named, strict=True):
            source_row = arith.select(is_run, arith.addi(run, row), name)
            source_row = _i64(arith.addi(first_row, source_row))
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

    inline(*sources, *tiles, listed, first_row, first_entry, last_entry, run)


def wait(groups: int) -> None:
    """Waits until all but the last so many groups have arrived, for the tensor cores to see."""

    @plgpu.inline_mgpu()
    def inline(_: Any) -> None:
        nvvm.cp_async_wait_group(groups)
        utils.commit_shared()

    inline()


def _index() -> ir.Type:
    return ir.IndexType.get()


def _i16_type() -> ir.Type:
    return ir.IntegerType.get_signless(16)


def _i64_type() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def _i32(value: int) -> ir.Value:
    return utils.c(value, ir.IntegerType.get_signless(32))


def _i64(value: ir.Value) -> ir.Value:
    return arith.extui(_i64_type(), value)
