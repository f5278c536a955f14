"""What `grouped_matmul` means, in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped.mxfp4 import MXFP4, dequantize


def grouped_matmul(
    x: Float[Array, "M k"], weights: Float[Array, "X k n"] | MXFP4, sizes: Int[Array, " X"]
) -> Float[Array, "M n"]:
    """See the public op; a row after another, so that a large model's matrices fit."""
    row = jnp.arange(x.shape[0])
    groups = jnp.searchsorted(jnp.cumsum(sizes), row, side="right")

    def multiply(row: tuple[Array, Array]) -> Array:
        values, group = row
        matrix = jax.tree.map(lambda w: w[group], weights)
        if isinstance(weights, MXFP4):
            matrix = dequantize(matrix, jnp.dtype(jnp.float32))
        wide = values.astype(jnp.float32), matrix.astype(jnp.float32)
        return jnp.dot(*wide, precision=jax.lax.Precision.HIGHEST).astype(x.dtype)

    return jax.lax.map(multiply, (x, groups))
