"""`sparse_attention` for Hopper (H100, H200): a Pallas Mosaic GPU kernel.

The listed blocks, in the list's order, and then the tail are one sequence of tiles of 64 keys, cut
into parts: one CTA attends for one KV head to one part. Where the dense kernel copies a tile with
one instruction of the copy engine, this one copies block by block; single positions are gathered by
the memory warpgroup's threads, 16 bytes each, since the copy engine cannot scatter rows on Hopper.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import splits

KEYS = 64  # keys of a tile
BLOCK_SIZES = (1, 8, 16, 32, 64)
MAX_ROWS = 64
PROCESSORS = 132


@dataclasses.dataclass(frozen=True)
class Config:
    """How a call is cut up.

    Attributes:
      parts: parts that the keys are cut into.
      stages: tiles in flight.
      turns: compute warpgroups that take turns at the tiles.
    """

    parts: int
    stages: int
    turns: int

    @classmethod
    def of(cls, batch: int, kv_heads: int, head_dim: int, most_tiles: int) -> "Config":
        """One wave of CTAs, of two tiles at least."""
        # More parts than eight take XLA a second kernel to combine, which costs what they gain.
        parts = min(PROCESSORS // (batch * kv_heads), -(-most_tiles // 2), 8)
        return cls(max(1, parts), 4, 2)


def refuses(
    q: Array,
    k: Array,
    v: Array,
    blocks: Array,
    counts: Array,
    lengths: Array,
    tail_start: Array,
    block_size: int,
    max_tail: int,
    scale: float,
    sinks: Array | None = None,
    gathered: object = None,
) -> str | None:
    """Why the arguments are outside the kernel's domain."""
    cache_rows = k.shape[2]
    refusal = splits.refuses_queries(q, k, MAX_ROWS)
    if refusal is not None:
        return refusal
    if block_size not in BLOCK_SIZES:
        listed = ", ".join(map(str, BLOCK_SIZES))
        return f"`block_size` must be one of {listed}, but is {block_size},"
    if cache_rows < KEYS or cache_rows % 8:
        return (
            f"`k` must have a multiple of 8 and at least {KEYS} cache rows, but has {cache_rows},"
        )
    return None


# Layers of one shape share one trace, one lowering and one compiled kernel.
@functools.partial(
    jax.jit, static_argnames=("block_size", "max_tail", "scale", "config", "interpret")
)
def sparse_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    blocks: Int[Array, "B heads N"],
    counts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    tail_start: Int[Array, " B"],
    block_size: int,
    max_tail: int,
    scale: float,
    sinks: Float[Array, " H"] | None = None,
    gathered: object = None,
    config: Config | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """See `pallas_kernels.sparse_attention`; `interpret` as in `plgpu.kernel`."""
    from pallas_kernels.mosaic_tiles import Tiling
    from pallas_kernels.sparse import mosaic_sm90_kernel

    del gathered
    batch, tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    order = tuple(range(tokens))
    rows = splits.pack(q, kv_heads, order)
    most_tiles = -(-blocks.shape[2] * block_size // KEYS) + -(-max_tail // KEYS)
    config = config or Config.of(batch, kv_heads, head_dim, most_tiles)
    if blocks.shape[2] == 0:  # something to point at; no entry counts
        blocks = jnp.zeros((*blocks.shape[:2], 1), jnp.int32)
    part_shape = (batch, kv_heads, config.parts, rows.shape[2])
    shapes = [
        jax.ShapeDtypeStruct((*part_shape, head_dim), jnp.float32),
        jax.ShapeDtypeStruct(part_shape, jnp.float32),
    ]
    # Single positions: the whole memory warpgroup fills a tile and arrives once; the emulation,
    # which cannot run that, copies them one by one.
    by_threads = block_size == 1 and interpret is None
    tiling = Tiling(
        packed=rows.shape[2],
        head_dim=head_dim,
        dtype=q.dtype,
        keys=KEYS,
        stages=config.stages,
        turns=config.turns,
        arrivals=1 if by_threads else KEYS // block_size,
        memory_registers=72 if by_threads else 40,
    )
    run = mosaic_sm90_kernel.build(
        tiling,
        config.parts,
        order,
        group,
        scale,
        block_size,
        k.shape,
        blocks.shape,
        shapes,
        by_threads,
        interpret,
    )
    if by_threads:
        k, v = (x.reshape(-1, head_dim) for x in (k, v))
        blocks = blocks.reshape(-1)
    out, lse = run(rows, k, v, blocks, counts, lengths, tail_start)
    out, lse, _ = splits.combine(out, lse, order, group, sinks, q.dtype)
    return out, lse


def emulate(*arguments: Any) -> Any:
    """`sparse_attention` in Pallas's emulation of a GPU, for tests; looks for races."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    params = plgpu.InterpretGPUParams(detect_races=True)
    return functools.partial(sparse_attention, interpret=params)(*arguments)
