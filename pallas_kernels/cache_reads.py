"""Reading a part of a cache inside a loop, with no copy of the whole."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def read_rows(
    cache: Float[Array, "B K S D"],
    slots: Int[Array, " b"] | None,
    begin: Int[Array, ""],
    size: int,
) -> Float[Array, "b K size D"]:
    """Cache rows begin .. begin+size-1 of every batch row, or of those that `slots` names."""
    cache, begin = _tie(cache, begin)
    if slots is None:
        return lax.dynamic_slice_in_dim(cache, begin, size, axis=2)
    return jax.vmap(lambda slot: _read(cache, slot, begin, size))(slots)


def read_ragged_rows(
    cache: Float[Array, "B K S D"],
    slots: Int[Array, " b"] | None,
    begin: Int[Array, " b"],
    size: int,
) -> Float[Array, "b K size D"]:
    """Cache rows begin[i] .. begin[i]+size-1 of batch row i, or of the one that slots[i] names."""
    cache, begin = _tie(cache, begin)
    if slots is None:
        slots = jnp.arange(begin.shape[0], dtype=begin.dtype)
    return jax.vmap(lambda slot, row: _read(cache, slot, row, size))(slots, begin)


def read_blocks(
    cache: Float[Array, "B K S D"], blocks: Int[Array, "B heads N"], block_size: int
) -> Float[Array, "B K N*block_size D"]:
    """The rows of the named aligned blocks, one after another.

    `blocks` has one list for all KV heads or one for each; S is a multiple of `block_size`.
    """
    cache, blocks = _tie(cache, blocks)
    batch, kv_heads, _, head_dim = cache.shape
    cache = cache.reshape(batch, kv_heads, -1, block_size, head_dim)
    blocks = jnp.broadcast_to(blocks, (batch, kv_heads, blocks.shape[2]))
    take = jax.vmap(jax.vmap(lambda rows, i: jnp.take(rows, i, axis=0, mode="clip")))
    return take(cache, blocks).reshape(batch, kv_heads, -1, head_dim)


def _read(cache: Array, slot: Array, begin: Array, size: int) -> Float[Array, "K size D"]:
    _, kv_heads, _, head_dim = cache.shape
    zero = jnp.zeros_like(begin)
    start = (slot.astype(begin.dtype), zero, begin, zero)
    return lax.dynamic_slice(cache, start, (1, kv_heads, size, head_dim))[0]


def _tie(cache: Array, index: Array) -> tuple[Array, Array]:
    """Makes a bfloat16 cache depend on the index that it is read at; other caches pass through.

    XLA's CPU backend reads bfloat16 arrays as float32 and hoists the conversion of the whole cache
    out of the loop. Tied to an index that changes with the trip, it stays inside and is fused with
    the read.
    """
    if cache.dtype != jnp.bfloat16:
        return cache, index
    return lax.optimization_barrier((cache, index))
