"""Rotary position embedding (RoFormer, arXiv 2104.09864), in the rotate-half layout of Qwen."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def rope_angles(
    positions: Int[Array, "b T"], head_dim: int, theta: float
) -> tuple[Float[Array, "b T 1 d"], Float[Array, "b T 1 d"]]:
    """Cosine and sine of position x frequency, d = head_dim / 2, for all heads of a token alike."""
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    inverse = jnp.asarray(frequencies, jnp.float32)
    angles = positions.astype(jnp.float32)[:, :, None, None] * inverse[None, None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(
    x: Float[Array, "b T H D"], cos: Float[Array, "b T 1 d"], sin: Float[Array, "b T 1 d"]
) -> Float[Array, "b T H D"]:
    """Rotates each pair (x[i], x[i + D/2]) by its angle, in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
