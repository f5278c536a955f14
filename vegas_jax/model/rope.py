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
    """Rotates each pair (x[i], x[i + D/2]) by its angle, in float32.

    Without taking the halves apart, so that XLA makes it part of what reads the result.
    """
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    cos, sin = cos[..., None, :], jnp.stack([-sin, sin], axis=-2)
    return (halves * cos + halves[..., ::-1, :] * sin).reshape(x.shape).astype(x.dtype)
