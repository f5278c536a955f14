"""Writing a few numbers straight from registers, which Pallas has no words for.

Staged in shared memory and copied by the copy engine, numbers that a kernel writes now and then
cost it barriers, and they leave the L2 cache for memory amid its reads, which takes the memory more
time than they would alone. Here they are written from registers, and marked as what the cache is to
evict last: they stay in it until they are read.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic_tiles import ROW_VALUES

# Words of a thread, and how far they are from where its first ones are.
Piece = tuple[tuple[int, ...], list[ir.Value]]
REF = plgpu.RefType()
SCALAR = plgpu.Layout.WG_SPLAT
# Of 64 rows each warp has 16, and each of its threads holds the sum of these, or both of 8.
SUMS = {
    summed: plgpu.Layout.TILED(
        plgpu.Tiling(((64 // summed,), (16 // summed,))),
        warp_dims=(-2,),
        lane_dims=(plgpu.Replicated(32),),
        vector_dim=-1,
    )
    for summed in (8, 16)
}


def sum_runs(x: Float[Array, " n"], summed: int) -> Float[Array, " n/summed"]:
    """Sums of every 8 or 16 neighbours of a vector in the layout ROW_VALUES, in that of SUMS."""
    size = x.shape[0] // summed

    @plgpu.inline_mgpu(
        arg_types=(ROW_VALUES,),
        return_type=plgpu.ShapeDtypeStruct((size,), x.dtype, layout=SUMS[summed]),
    )
    def inline(_: Any, x: Any) -> Any:
        layout = SUMS[summed].to_mgpu()
        kind = layout.registers_element_type(x.mlir_dtype)
        numbers = [vector.extract(number, [], [0]) for number in x.registers.flat]
        pairs = list(zip(numbers[::2], numbers[1::2], strict=True))  # rows i and i + 8
        vectors = [[arith.addf(*pair)] for pair in pairs] if summed == 16 else pairs
        sums = np.empty(layout.registers_shape((size,)), dtype=object)
        sums.flat = [vector.from_elements(kind, [_sum_rows(i) for i in own]) for own in vectors]
        return FragmentedArray(_registers=sums, _layout=layout, _is_signed=None)

    return inline(x)


def _sum_rows(number: ir.Value) -> ir.Value:
    """The sum over 8 rows, of which lanes i and i + 4 of a warp hold neighbours."""
    for distance in (4, 8, 16):
        number = arith.addf(number, utils.shfl_bfly(number, distance))
    return number


def store(values: Array, out: jax.Ref, first: int | Int[Array, ""], layout: Any) -> None:
    """Writes values[i] to out[first + i] in global memory, as far as there is such a place.

    Args:
      values: [n, columns], of 32 bits or, with an even number of 8 columns, of 16; or [n], of 32.
      out: [rows, even number of columns], or [rows].
      first: see above; not negative.
      layout: of the values, WGMMA or one of those above.
    """
    shape, rows = values.shape, out.shape[0]
    all_rows = isinstance(first, int) and first + shape[0] <= rows

    @plgpu.inline_mgpu(arg_types=(layout, REF, SCALAR))
    def inline(_: Any, values: Any, out: ir.Value, first: Any) -> None:
        kind = ir.MemRefType(out.type)
        strides, _ = kind.get_strides_and_offset()
        pieces = _words(values)
        # 64 bits to where `out` begins, 32 from there.
        assert kind.shape[0] * strides[0] < 2**31, kind
        places = values.layout.thread_idxs(shape)
        place = [arith.index_cast(_int(32), i) for i in next(iter(places))]
        place[0] = arith.addi(place[0], first.registers.item())
        if utils.bitwidth(kind.element_type) == 16:
            is_odd = arith.trunci(_int(1), utils.thread_idx())
            pieces = _exchange(pieces, is_odd)
            moved = arith.select(is_odd, utils.c(8 - 2, _int(32)), utils.c(0, _int(32)))
            place[1] = arith.addi(place[1], moved)
        at = utils.dyn_dot(place, [utils.c(stride, _int(32)) for stride in strides])
        base = llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(out))
        pointer = utils.getelementptr(base, [arith.extui(_int(64), at)], kind.element_type)
        policy = llvm.inline_asm(
            _int(64), [], "createpolicy.fractional.L2::evict_last.b64 $0;", "=l"
        )
        for ahead, words in pieces:
            if any(i >= size for i, size in zip(ahead, kind.shape, strict=True)):
                continue  # no thread has a place for it
            checked = [not all_rows, *(size > kind.shape[1] for size in shape[1:])]
            exists = [
                arith.cmpi(arith.CmpIPredicate.ult, own, utils.c(size - i, _int(32)))
                for own, i, size, check in zip(place, ahead, kind.shape, checked, strict=True)
                if check
            ]
            elements = sum(i * stride for i, stride in zip(ahead, strides, strict=True))
            offset = elements * utils.bitwidth(kind.element_type) // 8
            _store(words, pointer, offset, policy, exists)

    inline(values, out, lax.convert_element_type(first, "int32"))


def _words(values: Any) -> Iterator[Piece]:
    """A thread's vectors as words of 32 bits."""
    strides = values.layout.tiling.tile_strides(tuple(utils.get_contiguous_strides(values.shape)))
    for index, number in np.ndenumerate(values.registers):
        ahead = sum(i * stride for i, stride in zip(index, strides, strict=False))
        place = tuple(int(i) for i in np.unravel_index(ahead, values.shape))
        size = utils.bitwidth(number.type) // 32
        words = vector.bitcast(ir.VectorType.get((size,), _int(32)), number)
        yield place, [vector.extract(words, [], [i]) for i in range(size)]


def _exchange(pieces: Iterable[Piece], is_odd: ir.Value) -> Iterator[Piece]:
    """Trades words of two columns of 16 bits, so that a thread has two that are neighbours.

    Four threads have the words of 8 columns in turn. Of two times 8 columns, an even thread takes
    its own and the next thread's word of the first, an odd one the same two of the second: those
    6 columns ahead of where its word of the first was.
    """
    held = dict(pieces)
    for (row, column), [low] in held.items():
        if column % 16 == 0:
            [high] = held[row, column + 8]
            other = utils.shfl_bfly(arith.select(is_odd, low, high), 1)
            words = [arith.select(is_odd, other, low), arith.select(is_odd, high, other)]
            yield (row, column), words


def _store(
    words: list[ir.Value], pointer: ir.Value, offset: int, policy: ir.Value, where: list[ir.Value]
) -> None:
    """Writes one or two words, `offset` bytes after the pointer, with no branch."""
    operands, constraints = [pointer, policy, *words], "l,l" + ",r" * len(words)
    guard, width, listed = "", "", "$2"
    if len(words) == 2:
        width, listed = ".v2", "{$2, $3}"
    if where:
        guard, constraints = f"@${len(operands)} ", f"{constraints},b"
        operands.append(functools.reduce(arith.andi, where))
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        operands,
        f"{guard}st.global.L2::cache_hint{width}.b32 [$0 + {offset}], {listed}, $1;",
        constraints,
        has_side_effects=True,
    )


def _int(bits: int) -> ir.Type:
    return ir.IntegerType.get_signless(bits)
