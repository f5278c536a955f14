"""MXFP4: four bits a weight and a power of two for each 32 of them, as gpt-oss is published.

Source: OCP Microscaling Formats 1.0, sections 5.3 and 5.4; layout: model card openai/gpt-oss-20b.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

# E2M1: sign, two bits of exponent, one of mantissa.
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
BLOCK = 32  # weights that share a scale
BIAS = 127  # of a scale's exponent


class MXFP4(NamedTuple):
    """Packed matrices [..., n outputs, k inputs].

    Attributes:
      blocks: uint8 [..., n, k / 32, 16]: two weights a byte, the first in the low four bits.
      scales: uint8 [..., n, k / 32]: the exponent plus 127.
    """

    blocks: UInt8[Array, "*X n b 16"]
    scales: UInt8[Array, "*X n b"]


def dequantize(packed: MXFP4, dtype: jnp.dtype) -> Float[Array, "*X k n"]:
    """The matrices as k inputs by n outputs; exact in bfloat16 and float32."""
    low, high = packed.blocks & 15, packed.blocks >> 4
    codes = jnp.stack([low, high], axis=-1).reshape(*packed.scales.shape, BLOCK)
    values = jnp.asarray(np.array(VALUES, np.float32))[codes]
    scales = jnp.ldexp(jnp.float32(1), packed.scales.astype(jnp.int32) - BIAS)
    matrices = (values * scales[..., None]).astype(dtype)
    return matrices.reshape(*packed.scales.shape[:-1], -1).swapaxes(-1, -2)
