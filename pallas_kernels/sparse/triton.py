"""`sparse_attention` for NVIDIA GPUs from Ampere to Hopper: a Triton kernel.

It reads the listed rows where they are, through pointers. A program attends for one KV head to one
of several parts of a sequence's keys, the list's and then the tail's; the parts are joined
afterwards. How long the list and the tail are is read on the device.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import splits
from pallas_kernels.triton_calls import KEYS, MAX_ROWS, Config, launch, token_of_packed_row


def refuses(q: Array, k: Array, *rest: object) -> str | None:
    """Why the arguments are outside the kernel's domain."""
    del rest
    return splits.refuses_queries(q, k, MAX_ROWS)


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
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """See `pallas_kernels.sparse_attention`; `blocks` has one list for all KV heads or one each."""
    from pallas_kernels.sparse.triton_kernel import sparse_kernel

    del gathered
    batch, tokens, heads, head_dim = q.shape
    kv_heads, cache_rows = k.shape[1:3]
    group = heads // kv_heads
    if blocks.shape[2] == 0:  # an array to point at
        blocks = jnp.zeros((*blocks.shape[:2], 1), jnp.int32)
    lists, entries = blocks.shape[1:]
    order = tuple(range(tokens))
    rows = splits.pack(q, kv_heads, order)
    packed = rows.shape[2]
    most = entries * block_size + max_tail
    config = config or Config.of(batch, kv_heads, packed, head_dim, most)

    out, lse = launch(
        sparse_kernel,
        (
            *(rows, k, v, blocks, counts, lengths, tail_start),
            token_of_packed_row(order, group, config.row_tile),
        ),
        (
            jax.ShapeDtypeStruct((batch, kv_heads, config.parts, packed, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((batch, kv_heads, config.parts, packed), jnp.float32),
        ),
        (kv_heads, config.parts, batch),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        KV_HEADS=kv_heads,
        CACHE_ROWS=cache_rows,
        D=head_dim,
        TOKENS=tokens,
        ROWS=packed,
        ROW_TILE=config.row_tile,
        LISTS=lists,
        ENTRIES=entries,
        BLOCK_SIZE=block_size,
        KEYS=KEYS,
        PARTS=config.parts,
        TO_LOG2=scale * splits.LOG2_E,
    )
    out, lse, _ = splits.combine(out, lse, order, group, sinks, q.dtype)
    return out, lse
