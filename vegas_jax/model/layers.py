"""What the parts of a transformer share: weights, products, norms."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.precision import precision_of

init_weight = nn.initializers.normal(0.02)


def linear(x: Float[Array, "b T i"], weight: Float[Array, "i *o"]) -> Float[Array, "b T *o"]:
    """x @ weight in the compute dtype; on a mesh the columns may have several axes."""
    return jnp.einsum("bti,i...->bt...", x, weight, precision=precision_of(x.dtype))


def add_bias(x: Float[Array, "*rest o"], bias: Float[Array, "*last o"]) -> Float[Array, "*rest o"]:
    """x + bias, which has the last axes of x alone: the same for all rows."""
    return x + jnp.expand_dims(bias, range(x.ndim - bias.ndim))


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv 1910.07467), computed in float32 with float32 weights."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "... n"]) -> Float[Array, "... n"]:
        """Normalises the last axis."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.eps)
        return (wide * jnp.expand_dims(scale, range(x.ndim - 1))).astype(x.dtype)
