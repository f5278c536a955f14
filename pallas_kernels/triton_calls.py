"""What the Triton kernels of the ops share on JAX's side: their domain, grid and launch.

Triton and jax-triton are imported when a kernel is first traced: jax-triton cannot be imported
where JAX has no CUDA plugin.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

KEYS = 64  # keys of a tile
MAX_ROWS = 128
MAX_PARTS = 32
PROCESSORS = 128  # of an A100, an RTX 4090 and an H100: 108, 128 and 132


@dataclasses.dataclass(frozen=True)
class Config:
    """How an attention kernel's work is cut up.

    Attributes:
      parts: into how many parts the keys of each sequence are cut.
      row_tile: packed rows of a program; a power of two that the tensor cores take.
      num_warps: of a program.
      num_stages: tiles of keys and values in flight.
    """

    parts: int
    row_tile: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, batch: int, kv_heads: int, rows: int, head_dim: int, keys: int) -> "Config":
        """For packed queries [batch, kv_heads, rows, head_dim] and at most `keys` keys a sequence.

        About two waves of programs, each with a tile of keys or more, and as many stages as leave
        every kernel under the 99 KiB of shared memory that Ada has: 44 KiB up to 32 rows, so that
        two programs share a processor, and 96 KiB at 128 rows (on Hopper 128 KiB of 227).
        """
        parts = min(max(1, 2 * PROCESSORS // (batch * kv_heads)), MAX_PARTS, -(-keys // KEYS))
        row_tile = max(16, 1 << (rows - 1).bit_length())
        return cls(parts, row_tile, 4 if row_tile <= 32 else 8, 3 if head_dim == 64 else 2)


def token_of_packed_row(
    order: tuple[int, ...], group: int, row_tile: int
) -> Int[Array, " row_tile"]:
    """The query token of each row that `splits.pack` makes; 0 for the rows past them."""
    tokens = np.zeros(row_tile, np.int32)
    tokens[: len(order) * group] = np.repeat(order, group)
    return jnp.asarray(tokens)


def launch(
    kernel: Any,
    inputs: Sequence[Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    *,
    num_warps: int,
    num_stages: int,
    **constants: object,
) -> list[Array]:
    """Runs a `triton.jit` function on the arrays' pointers, inputs first; returns the outputs."""
    import jax_triton

    settings = {"num_warps": num_warps, "num_stages": num_stages}
    return jax_triton.triton_call(
        *inputs, kernel=kernel, out_shape=list(outputs), grid=grid, **settings, **constants
    )
