"""Rotary position embedding (RoFormer, arXiv 2104.09864), in the rotate-half layout.

Scaled frequencies: linear; YaRN (arXiv 2309.00071, section 3.1 to 3.4); Llama 3 (model card:
meta-llama/Llama-3.1-8B).
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from vegas_jax.model.config import ModelConfig, RopeScaling


def rope_angles(
    config: ModelConfig, positions: Int[Array, "b T"]
) -> tuple[Float[Array, "b T 1 d"], Float[Array, "b T 1 d"]]:
    """Cosine and sine of position x frequency, d = head_dim / 2, for all heads of a token alike.

    Times YaRN's attention factor, which so multiplies queries and keys.
    """
    inverse = jnp.asarray(frequencies(config), jnp.float32)
    angles = positions.astype(jnp.float32)[:, :, None, None] * inverse[None, None, None, :]
    factor = attention_factor(config.rope_scaling)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def frequencies(config: ModelConfig) -> np.ndarray:
    """Radians a position, float64 [head_dim / 2], fastest first."""
    dim, theta, scaling = config.head_dim, config.rope_theta, config.rope_scaling
    plain = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if scaling is None:
        return plain
    slowed = plain / scaling.factor
    if scaling.kind == "linear":
        return slowed
    if scaling.kind == "yarn":
        kept = _yarn_kept(scaling, dim, theta)
    else:
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        rotations = scaling.original_max_position_embeddings * plain / (2 * math.pi)
        kept = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return plain * kept + slowed * (1 - kept)


def attention_factor(scaling: RopeScaling | None) -> float:
    """What YaRN multiplies queries and keys with."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0


def _yarn_kept(scaling: RopeScaling, dim: int, theta: float) -> np.ndarray:
    """How much of each plain frequency stays, from 1 (fast ones) down to 0: a linear ramp."""

    def dimension(rotations: float) -> float:
        """The pair whose frequency makes so many rotations in the original context."""
        wavelengths = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(wavelengths) / (2 * math.log(theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    ramp = (np.arange(dim // 2) - first) / max(last - first, 0.001)
    return 1.0 - np.clip(ramp, 0.0, 1.0)


def apply_rope(
    x: Float[Array, "b T H D"], cos: Float[Array, "b T 1 d"], sin: Float[Array, "b T 1 d"]
) -> Float[Array, "b T H D"]:
    """Rotates each pair (x[i], x[i + D/2]) by its angle, in float32.

    Without taking the halves apart, so that XLA makes it part of what reads the result.
    """
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    cos, sin = cos[..., None, :], jnp.stack([-sin, sin], axis=-2)
    return (halves * cos + halves[..., ::-1, :] * sin).reshape(x.shape).astype(x.dtype)
