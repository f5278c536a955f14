"""`grouped_matmul` for any machine.

On a CPU a loop over blocks of rows, each with one group's matrix, where `jax.lax.ragged_dot` is 10
to 60 times slower; elsewhere that, since there a loop's trips cost more than its products.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped.mxfp4 import MXFP4, dequantize
from pallas_kernels.precision import precision_of

MAX_ROWS = 128  # of a block


def grouped_matmul(
    x: Float[Array, "M k"], weights: Float[Array, "X k n"] | MXFP4, sizes: Int[Array, " X"]
) -> Float[Array, "M n"]:
    """See the public op."""
    result: Array = lax.platform_dependent(x, weights, sizes, cpu=by_loop, default=by_ragged_dot)
    return result


def by_ragged_dot(
    x: Float[Array, "M k"], weights: Float[Array, "X k n"] | MXFP4, sizes: Int[Array, " X"]
) -> Float[Array, "M n"]:
    """XLA's own op; packed matrices are dequantised first, all of them."""
    matrices = dequantize(weights, x.dtype) if isinstance(weights, MXFP4) else weights
    return lax.ragged_dot(x, matrices, sizes, precision=precision_of(x.dtype))


def by_loop(
    x: Float[Array, "M k"], weights: Float[Array, "X k n"] | MXFP4, sizes: Int[Array, " X"]
) -> Float[Array, "M n"]:
    """Reads the matrices of groups that have rows, and no others."""
    count, width = x.shape
    groups = sizes.shape[0]
    rows = block_rows(count, groups)
    blocks = -(-sizes // rows)
    first_rows, last_blocks = jnp.cumsum(sizes) - sizes, jnp.cumsum(blocks)
    outputs = weights.blocks.shape[1] if isinstance(weights, MXFP4) else weights.shape[2]

    def multiply(block: Array, out: Array) -> Array:
        group = jnp.searchsorted(last_blocks, block, side="right")
        ahead = block - (last_blocks[group] - blocks[group])
        start = first_rows[group] + ahead * rows
        piece = lax.dynamic_slice(padded, (start, jnp.zeros_like(start)), (rows, width))
        matrix = jax.tree.map(lambda w: w[group], weights)
        if isinstance(weights, MXFP4):
            matrix = dequantize(matrix, x.dtype)
        product = jnp.dot(piece, matrix, precision=precision_of(x.dtype))
        # A group's last block spills into the next group's rows, which come later and mend that.
        return lax.dynamic_update_slice(out, product, (start, jnp.zeros_like(start)))

    padded = jnp.pad(x, ((0, rows), (0, 0)))
    out = jnp.zeros((count + rows, outputs), x.dtype)
    return lax.fori_loop(0, last_blocks[-1], multiply, out)[:count]


def block_rows(count: int, groups: int) -> int:
    """About as many as a group has on average: few wasted rows, few readings of a matrix twice."""
    average = max(1, count // groups)
    return min(MAX_ROWS, 1 << (average - 1).bit_length())
