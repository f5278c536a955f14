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

    def constants(self) -> dict[str, int]:
        """Those of a kernel."""
        return {"ROWS": self.rows, "COLUMNS": self.columns, "INNER": self.inner}


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
    packed = isinstance(weights, MXFP4)
    outputs = weights.blocks.shape[1] if packed else weights.shape[2]
    tiles = tiles or Tiles.of(rows, groups, packed)
    # Groups that have rows, and the blocks that one of them fills.
    blocks = min(rows, groups) + rows // tiles.rows
    shape = jax.ShapeDtypeStruct((rows, outputs), x.dtype)
    constants = {"K": inputs, "N": outputs, "GROUPS": groups, **tiles.constants()}
    settings = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, **constants}
    grid = (-(-outputs // tiles.columns), blocks, 1)
    if packed:
        quarters = x.reshape(rows, inputs // 4, 4).transpose(2, 0, 1)
        arrays = (quarters, weights.blocks, weights.scales, sizes)
        kernel, settings = triton_kernel.grouped_mxfp4_kernel, {"M": rows, **settings}
    else:
        arrays, kernel = (x, weights, sizes), triton_kernel.grouped_kernel
    (out,) = launch(kernel, arrays, (shape,), grid, **settings)
    return out
