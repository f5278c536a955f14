"""`grouped_matmul` for NVIDIA GPUs from Ampere to Hopper: Triton kernels.

A program multiplies a block of one group's rows by some columns of its matrix, which is read once
for each block: groups without rows are not read. Which rows a block has is found on the device.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped.mxfp4 import MXFP4
from pallas_kernels.triton_calls import launch

MAX_GROUPS = 1024


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the work is cut up.

    Attributes:
      rows: of a block.
      columns: of a matrix that a program multiplies by.
      inner: what it takes of each at a time.
      num_warps: of a program.
      num_stages: tiles in flight.
    """

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, rows: int, groups: int, packed: bool) -> "Tiles":
        """For so many rows, spread over so many groups."""
        average = max(1, rows // groups)
        tile = min(128, max(16, 1 << (average - 1).bit_length()))
        if tile <= 32:
            return cls(tile, 64, 256, 4, 3) if packed else cls(tile, 64, 64, 4, 5)
        if packed:
            return cls(128, 128, 128, 8, 3)
        return cls(64, 128, 64, 4, 3) if tile == 64 else cls(128, 256, 64, 8, 3)


def refuses(x: Array, weights: Array | MXFP4, sizes: Array) -> str | None:
    """Why the arguments are outside the kernels' domain."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"`x` must be bfloat16 or float16, but is {x.dtype},"
    if sizes.shape[0] > MAX_GROUPS:
        return f"`sizes` must be of at most {MAX_GROUPS} groups, but is of {sizes.shape[0]},"
    return None


def grouped_matmul(
    x: Float[Array, "M k"],
    weights: Float[Array, "X k n"] | MXFP4,
    sizes: Int[Array, " X"],
    tiles: Tiles | None = None,
) -> Float[Array, "M n"]:
    """See the public op."""
    from pallas_kernels.grouped import triton_kernel

    (rows, inputs), groups = x.shape, sizes.shape[0]
    if isinstance(weights, MXFP4):
        outputs, kernel = weights.blocks.shape[1], triton_kernel.grouped_mxfp4_kernel
        quarters = x.reshape(rows, inputs // 4, 4).swapaxes(1, 2)
        arrays: tuple[Array, ...] = (quarters, *weights, sizes)
    else:
        outputs, kernel = weights.shape[2], triton_kernel.grouped_kernel
        arrays = (x, weights, sizes)
    tiles = tiles or Tiles.of(rows, groups, isinstance(weights, MXFP4))
    # Groups that have rows, and the blocks that one of them fills.
    blocks = min(rows, groups) + rows // tiles.rows
    (out,) = launch(
        kernel,
        arrays,
        (jax.ShapeDtypeStruct((rows, outputs), x.dtype),),
        (-(-outputs // tiles.columns), blocks, 1),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        K=inputs,
        N=outputs,
        GROUPS=groups,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        INNER=tiles.inner,
    )
    return out
