"""Writing a few numbers straight from registers, which Pallas has no words for.

Staged in shared memory and copied by the copy engine, numbers that a kernel writes now and then
cost it barriers, and they leave the L2 cache for memory amid its reads, which takes the memory more
time than they would alone. Here they are written from registers, and marked as what the cache is to
evict last: they stay in it until they are read.
"""

import functools
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
        words = _words(values)
        place = [
            arith.index_cast(_int(64), i) for i in next(iter(values.layout.thread_idxs(shape)))
        ]
        place[0] = arith.addi(place[0], arith.extui(_int(64), first.registers.item()))
        if utils.bitwidth(kind.element_type) == 16:
            words, moved = _exchange(words)
            place[1] = arith.addi(place[1], moved)
        at = utils.dyn_dot(place, [utils.c(stride, _int(64)) for stride in strides])
        base = llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(out))
        pointer = utils.getelementptr(base, [at], kind.element_type)
        policy = llvm.inline_asm(
            _int(64), [], "createpolicy.fractional.L2::evict_last.b64 $0;", "=l"
        )
        for ahead, stored in words.items():
            if any(i >= size for i, size in zip(ahead, kind.shape, strict=True)):
                continue  # no thread has a place for it
            checked = [not all_rows, *(size > kind.shape[1] for size in shape[1:])]
            exists = [
                arith.cmpi(arith.CmpIPredicate.ult, place[i], utils.c(kind.shape[i] - at, _int(64)))
                for i, at in enumerate(ahead)
                if checked[i]
            ]
            ahead = sum(i * stride for i, stride in zip(ahead, strides, strict=True))
            ahead = ahead * utils.bitwidth(kind.element_type) // 8
            _store(stored, pointer, ahead, policy, exists)

    inline(values, out, lax.convert_element_type(first, "int32"))


def _words(values: Any) -> dict[tuple[int, ...], list[ir.Value]]:
    """A thread's vectors as words of 32 bits, by how far each is from the thread's first one."""
    strides = values.layout.tiling.tile_strides(tuple(utils.get_contiguous_strides(values.shape)))
    found = {}
    for index, number in np.ndenumerate(values.registers):
        ahead = sum(i * stride for i, stride in zip(index, strides, strict=False))
        size = utils.bitwidth(number.type) // 32
        words = vector.bitcast(ir.VectorType.get((size,), _int(32)), number)
        place = tuple(int(i) for i in np.unravel_index(ahead, values.shape))
        found[place] = [vector.extract(words, [], [i]) for i in range(size)]
    return found


def _exchange(
    words: dict[tuple[int, ...], list[ir.Value]],
) -> tuple[dict[tuple[int, ...], list[ir.Value]], ir.Value]:
    """Trades words of two columns of 16 bits, so that a thread has two that are neighbours.

    Four threads have the words of 8 columns in turn. Of two times 8 columns, an even thread takes
    its own and the next thread's word of the first, an odd one the same two of the second.

    Returns:
      Pairs of words, by where the first 8 columns begin; and how far ahead of these the thread's
      own columns are.
    """
    thread = utils.thread_idx()
    is_odd = arith.cmpi(
        arith.CmpIPredicate.ne, arith.andi(thread, utils.c(1, _int(32))), utils.c(0, _int(32))
    )
    found = {}
    for (row, column), [low] in words.items():
        if column % 16:
            continue
        [high] = words[row, column + 8]
        other = utils.shfl_bfly(arith.select(is_odd, low, high), 1)
        found[row, column] = [arith.select(is_odd, other, low), arith.select(is_odd, high, other)]
    return found, arith.select(is_odd, utils.c(8 - 2, _int(64)), utils.c(0, _int(64)))


def _store(
    words: list[ir.Value], pointer: ir.Value, ahead: int, policy: ir.Value, where: list[ir.Value]
) -> None:
    """Writes one or two words, `ahead` bytes after the pointer, with no branch."""
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
        f"{guard}st.global.L2::cache_hint{width}.b32 [$0 + {ahead}], {listed}, $1;",
        constraints,
        has_side_effects=True,
    )


def _int(bits: int) -> ir.Type:
    return ir.IntegerType.get_signless(bits)
