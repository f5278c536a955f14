"""The public `grouped_matmul`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.checks import as_int32, require, require_array, require_shape
from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.grouped import reference, triton, xla
from pallas_kernels.grouped.mxfp4 import BLOCK, MXFP4

IMPLEMENTATIONS = {
    "triton": Implementation(triton.grouped_matmul, triton.refuses),
    "xla": Implementation(xla.grouped_matmul),
    "reference": Implementation(reference.grouped_matmul),
}


def grouped_matmul(
    x: Float[Array, "M k"],
    weights: Float[Array, "X k n"] | MXFP4,
    sizes: Int[Array, " X"],
    *,
    kernels: str = "auto",
) -> Float[Array, "M n"]:
    """Multiplies rows that are sorted by group with the matrix of their group.

    The first sizes[0] rows belong to matrix 0, the next sizes[1] to matrix 1, and so on. Matrices
    of groups without rows are not read. Rows beyond all groups get a product that means nothing.
    Assumed but unchecked: `sizes` add up to M at most.

    Args:
      x: the rows.
      weights: one matrix a group, of x's dtype, or MXFP4, which is dequantised as it is read.
      sizes: rows of each group.
      kernels: which implementation runs, see `pallas_kernels.dispatch`.

    Returns:
      The products, in x's dtype.

    Raises:
      ValueError: an argument has a wrong shape, type or name.
    """
    require_array("x", x)
    require(
        x.ndim == 2 and x.dtype in (jnp.float32, jnp.bfloat16, jnp.float16),
        "x",
        f"must be rows of floats of 16 or 32 bits, but is {x.dtype}{list(x.shape)}",
    )
    if isinstance(weights, MXFP4):
        for name, part in zip(MXFP4._fields, weights, strict=True):
            require_array(f"weights.{name}", part)
        shape = weights.scales.shape
        require(len(shape) == 3, "weights.scales", f"must have three axes, but has shape {shape}")
        groups, outputs, scales = shape
        require_shape("weights.scales", weights.scales, (groups, outputs, x.shape[1] // BLOCK))
        require_shape("weights.blocks", weights.blocks, (groups, outputs, scales, BLOCK // 2))
        for name, part in zip(MXFP4._fields, weights, strict=True):
            require(part.dtype == jnp.uint8, f"weights.{name}", f"must be uint8, not {part.dtype}")
        require(x.shape[1] % BLOCK == 0, "x", f"must have a multiple of {BLOCK} columns")
    else:
        require_array("weights", weights)
        require(
            weights.ndim == 3 and weights.shape[1] == x.shape[1] and weights.dtype == x.dtype,
            "weights",
            f"must be {x.dtype}[X, {x.shape[1]}, n], but is {weights.dtype}{list(weights.shape)}",
        )
        groups = weights.shape[0]
    require(groups > 0, "weights", "must have a matrix, but has none")
    sizes = as_int32("sizes", sizes, (groups,))
    # NumPy's arrays cannot be indexed by traced numbers.
    arguments = (jnp.asarray(x), jax.tree.map(jnp.asarray, weights), sizes)
    return choose(kernels, IMPLEMENTATIONS, *arguments)(*arguments)
