"""What `grouped_matmul` means, in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped.mxfp4 import MXFP4, dequantize


def grouped_matmul(
    x: Float[Array, "M k"], weights: Float[Array, "X k n"] | MXFP4, sizes: Int[Array, " X"]
) -> Float[Array, "M n"]:
    """See the public op."""
    if isinstance(weights, MXFP4):
        weights = dequantize(weights, jnp.dtype(jnp.float32))
    row = jnp.arange(x.shape[0])
    group = jnp.searchsorted(jnp.cumsum(sizes), row, side="right")
    wide = x.astype(jnp.float32), weights[group].astype(jnp.float32)
    out = jnp.einsum("mk,mkn->mn", *wide, precision=jax.lax.Precision.HIGHEST)
    return out.astype(x.dtype)
