"""Counting and compacting over the threads of a cluster, which Pallas has no words for.

The functions here are called in a Mosaic GPU kernel by all warpgroups of all blocks of a cluster,
each with masks over its own run of positions, laid out as `run_layout` says. `sums` is int32
[2, words, warps in the cluster] in shared memory, where `words` is what `words_of` says; calls in
turn use its slots 0 and 1 in turn, so that no barrier is needed between reading one call's counts
and writing the next one's.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, nvvm, scf, vector
from jaxtyping import Array, Bool, Int

WARP = 32  # threads
WARPS = 4  # in a warpgroup
VECTOR = 4  # neighbouring elements in one thread: a 16-byte load of float32
TILE = WARP * VECTOR  # neighbouring elements in one warp
BYTES = 4  # in a word
MAX_PAIRED = 2**16 - 1  # a count that fits in half a word

SCALAR = plgpu.Layout.WG_SPLAT
REF = plgpu.RefType()
for_range: Any = scf.for_  # whose stub names another function


def run_layout(size: int) -> Any:
    """The layout of a warpgroup's `size` elements: a contiguous quarter in each warp.

    A warp holds its quarter by tiles of 128 elements, a thread 4 neighbours of each tile.
    """
    tiles = tuple(dict.fromkeys([(size,), (size // WARPS,), (TILE,), (VECTOR,)]))
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiles), warp_dims=(-len(tiles),), lane_dims=(-2,), vector_dim=-1
    )


def words_of(masks: int) -> int:
    """How many words hold the counts of that many masks, two in a word."""
    return -(-masks // 2)


def counts(
    masks: Sequence[Bool[Array, " T"]], sums: jax.Ref, slot: Int[Array, ""], *, blocks: int
) -> list[Int[Array, ""]]:
    """How many elements of each mask are set over all warpgroups of the cluster's `blocks` blocks.

    The masks of one call, if several, have at most `MAX_PAIRED` elements in the cluster.
    """

    @plgpu.inline_mgpu(
        arg_types=([run_layout(mask.shape[0]) for mask in masks], REF, SCALAR),
        return_type=[plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR) for _ in masks],
    )
    def inline(_: Any, masks: list[Any], sums: ir.Value, slot: Any) -> Any:
        in_thread = _pair([_count_set(mask.registers.flat) for mask in masks])
        in_warp = [_sum_lanes(word) for word in in_thread]
        _, in_all = _share(in_warp, sums, slot.registers.item(), blocks)
        numbers = _unpair([_sum_lanes(word) for word in in_all], len(masks))
        return [FragmentedArray.splat(x, shape=(), is_signed=True) for x in numbers]

    return list(inline(list(masks), sums, slot))


def compact(
    mask: Bool[Array, " T"],
    first: Int[Array, ""],
    row: Int[Array, ""],
    positions: jax.Ref,
    sums: jax.Ref,
    slot: Int[Array, ""],
    *,
    blocks: int,
) -> None:
    """Writes the positions of the set elements in ascending order, then zeros.

    Args:
      mask: of the warpgroup's positions first, first + 1, ...
      first: ascends over the cluster's warpgroups in the order of block, then warpgroup.
      row: which row of `positions` is written.
      positions: int32 [rows, size] in global memory; at most `size` elements are set in all.
      sums: see above.
      slot: see above.
      blocks: in the cluster.
    """
    size = mask.shape[0]

    @plgpu.inline_mgpu(arg_types=(run_layout(size), SCALAR, SCALAR, REF, REF, SCALAR))
    def inline(
        _: Any,
        mask: Any,
        first: Any,
        row: Any,
        positions: ir.Value,
        sums: ir.Value,
        slot: Any,
    ) -> None:
        first, row, slot = (scalar.registers.item() for scalar in (first, row, slot))
        lane, warp = _lane_and_warp()
        tiles = list(mask.registers.flat)
        before, in_tile = _scan_lanes([_count_set([tile]) for tile in tiles], lane)
        [in_lower], [in_all] = _share([_add(*in_tile)], sums, slot, blocks)
        rank, total = _sum_lanes(in_lower), _sum_lanes(in_all)

        warp_first = _mul(arith.andi(warp, _i32(WARPS - 1)), _i32(size // WARPS))
        position = _add(first, warp_first, _mul(lane, _i32(VECTOR)))
        row = _index(row)
        for i, tile in enumerate(tiles):
            lane_rank = _add(rank, before[i])
            for j in range(VECTOR):
                is_set = vector.extract(tile, [], [j])
                with utils.when(is_set):
                    at = [row, _index(lane_rank)]
                    memref.store(_add(position, _i32(i * TILE + j)), positions, at)
                lane_rank = _add(lane_rank, arith.extui(_i32_type(), is_set))
            rank = _add(rank, in_tile[i])

        width = ir.MemRefType(positions.type).shape[-1]
        warps = _warps(sums)
        thread = _add(_mul(_own(warp, warps, blocks), _i32(WARP)), lane)
        start, stop, step = _add(total, thread), _i32(width), _i32(warps * WARP)
        for i in for_range(_index(start), _index(stop), _index(step)):
            memref.store(_i32(0), positions, [row, i])
            scf.yield_([])

    inline(mask, first, row, positions, sums, slot)


def _share(
    words: Sequence[ir.Value], sums: ir.Value, slot: ir.Value, blocks: int
) -> tuple[list[ir.Value], list[ir.Value]]:
    """Of words that each warp has: their sums over the warps before this one, and over all.

    Returned as what each lane has of them.
    """
    lane, warp = _lane_and_warp()
    _, size, warps = ir.MemRefType(sums.type).shape
    own = _own(warp, warps, blocks)
    with utils.when(_below(lane, _i32(blocks))):
        for i, word in enumerate(words):
            if blocks == 1:
                memref.store(word, sums, [_index(slot), _index(_i32(i)), _index(own)])
            else:  # each lane to another block
                offset = _add(_mul(_add(_mul(slot, _i32(size)), _i32(i)), _i32(warps)), own)
                local = utils.getelementptr(utils.memref_ptr(sums), [offset], _i32_type())
                llvm.store(word, utils.get_cluster_ptr(local, lane))
    if blocks == 1:
        gpu.barrier()
    else:
        nvvm.cluster_arrive()  # releases the stores
        nvvm.cluster_wait()

    before, total = [], []
    for i in range(len(words)):
        before.append(_i32(0))
        total.append(_i32(0))
        for start in range(0, warps, WARP):
            other = _add(lane, _i32(start))
            exists = _below(other, _i32(warps))
            other_or_last = arith.minui(other, _i32(warps - 1))
            shared = memref.load(sums, [_index(slot), _index(_i32(i)), _index(other_or_last)])
            total[i] = _add(total[i], arith.select(exists, shared, _i32(0)))
            before[i] = _add(before[i], arith.select(_below(other, own), shared, _i32(0)))
    return before, total


def _pair(numbers: list[ir.Value]) -> list[ir.Value]:
    """Words whose halves are two of the numbers each; a last word may be one number."""
    pairs = [numbers[i : i + 2] for i in range(0, len(numbers), 2)]
    return [_add(pair[0], *(arith.shli(x, _i32(16)) for x in pair[1:])) for pair in pairs]


def _unpair(words: list[ir.Value], number: int) -> list[ir.Value]:
    """What `_pair` was given."""
    if number == 1:
        return words
    halves = [[arith.andi(x, _i32(0xFFFF)), arith.shrui(x, _i32(16))] for x in words]
    return [x for pair in halves for x in pair][:number]


def _scan_lanes(numbers: list[ir.Value], lane: ir.Value) -> tuple[list[ir.Value], list[ir.Value]]:
    """For numbers up to 4 that each lane has: their sums over the lanes before it, and over all.

    The sums are at most 128, so four of them share the bytes of a word.
    """
    before, total = [], []
    for start in range(0, len(numbers), BYTES):
        group = numbers[start : start + BYTES]
        own = _add(*(arith.shli(x, _i32(8 * i)) for i, x in enumerate(group)))
        through = own  # sum over the lanes up to this one
        for distance in (1, 2, 4, 8, 16):
            lower = _shuffle(through, _i32(distance), nvvm.ShflKind.up, 0)
            has_lower = _below(_i32(distance - 1), lane)
            through = _add(through, arith.select(has_lower, lower, _i32(0)))
        last = _shuffle(through, _i32(WARP - 1), nvvm.ShflKind.idx, WARP - 1)
        before += _bytes(arith.subi(through, own), len(group))
        total += _bytes(last, len(group))
    return before, total


def _bytes(word: ir.Value, number: int) -> list[ir.Value]:
    shifted = (arith.shrui(word, _i32(8 * i)) for i in range(number))
    return [arith.andi(x, _i32(0xFF)) for x in shifted]


def _count_set(masks: Iterable[ir.Value]) -> ir.Value:
    """How many elements of a thread's vectors are set.

    Counts in float32: the compiler then makes one compare instruction and one addition of each
    element, which run in different units, where it makes three dependent ones of integers.
    """
    vector_type = ir.VectorType.get((VECTOR,), ir.F32Type.get())
    numbers = [arith.uitofp(vector_type, mask) for mask in masks]
    numbers = [vector.extract(_tree(numbers), [], [j]) for j in range(VECTOR)]
    return arith.fptoui(_i32_type(), _tree(numbers))


def _tree(numbers: list[ir.Value]) -> ir.Value:
    """A sum by pairs, whose additions need not wait for each other."""
    while len(numbers) > 1:
        odd = numbers[len(numbers) // 2 * 2 :]
        numbers = [*map(arith.addf, numbers[::2], numbers[1::2]), *odd]
    return numbers[0]


def _sum_lanes(number: ir.Value) -> ir.Value:
    return utils.redux(number, _i32(-1), utils.ReductionKind.ADD)


def _shuffle(word: ir.Value, operand: ir.Value, kind: Any, clamp: int) -> ir.Value:
    return nvvm.shfl_sync(_i32(-1), word, operand, _i32(clamp), kind)


def _lane_and_warp() -> tuple[ir.Value, ir.Value]:
    """A thread's lane in its warp, and the warp's index in the block."""
    thread = utils.thread_idx()
    return arith.andi(thread, _i32(WARP - 1)), arith.shrui(thread, _i32(5))


def _own(warp: ir.Value, warps: int, blocks: int) -> ir.Value:
    """A warp's index in the cluster, from that in the block."""
    block = arith.index_cast(_i32_type(), utils.cluster_idx())
    return _add(_mul(block, _i32(warps // blocks)), warp)


def _warps(sums: ir.Value) -> int:
    """In the cluster."""
    return ir.MemRefType(sums.type).shape[-1]


def _add(first: ir.Value, *rest: ir.Value) -> ir.Value:
    for number in rest:
        first = arith.addi(first, number)
    return first


def _mul(a: ir.Value, b: ir.Value) -> ir.Value:
    return arith.muli(a, b)


def _below(a: ir.Value, b: ir.Value) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.ult, a, b)


def _index(number: ir.Value) -> ir.Value:
    return arith.index_castui(ir.IndexType.get(), number)


def _i32(number: int) -> ir.Value:
    return utils.c(number, _i32_type())


def _i32_type() -> ir.Type:
    return ir.IntegerType.get_signless(32)
