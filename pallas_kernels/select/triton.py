"""`select_top_k` for NVIDIA GPUs from Ampere to Hopper: a Triton kernel, one program a row.

Exact and the same each time: the k-th highest score is found by counting, and nothing depends on
the order in which threads run.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.triton_calls import launch

MAX_CHUNK = 8192  # scores that a program looks at at a time


def refuses(scores: Array, k: Array, max_k: int) -> str | None:
    """Why the arguments are outside the kernel's domain."""
    del k, max_k
    return "`scores` must not be empty" if scores.size == 0 else None


def select_top_k(
    scores: Float[Array, "*rest M"], k: Int[Array, "*rest"], max_k: int
) -> tuple[Int[Array, "*rest max_k"], Int[Array, "*rest"]]:
    """See `pallas_kernels.select_top_k`; scores are float32."""
    from pallas_kernels.select.triton_kernel import select_kernel

    *rest, size = scores.shape
    rows = k.size
    chunk = min(MAX_CHUNK, max(128, 1 << (size - 1).bit_length()))
    positions, counts = launch(
        select_kernel,
        (ranking_keys(scores).reshape(rows, size), k.reshape(rows)),
        (
            jax.ShapeDtypeStruct((rows, max_k), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
        ),
        (rows,),
        num_warps=max(1, min(16, chunk // 256)),
        num_stages=1,
        SIZE=size,
        MAX_K=max_k,
        CHUNK=chunk,
    )
    return positions.reshape(*rest, max_k), counts.reshape(rest)


def ranking_keys(scores: Float[Array, "*rest M"]) -> UInt32[Array, "*rest M"]:
    """Integers in the order of float32 scores; 0 for NaN and -inf.

    All on bits, since what comparisons make of subnormal numbers depends on the machine.
    """
    sign, infinity, smallest_normal = map(jnp.uint32, (0x80000000, 0x7F800000, 0x00800000))
    bits = lax.bitcast_convert_type(scores, jnp.uint32)
    magnitude = bits & ~sign
    bits = jnp.where(magnitude < smallest_normal, jnp.uint32(0), bits)
    keys = jnp.where(bits >= sign, ~bits, bits | sign)
    never = (magnitude > infinity) | (bits == (sign | infinity))
    return jnp.where(never, jnp.uint32(0), keys)
