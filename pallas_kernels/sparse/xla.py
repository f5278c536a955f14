"""`sparse_attention` for any platform: gathers chunks of the list, then reads the tail."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import online_softmax
from pallas_kernels.cache_reads import read_blocks, read_ragged_rows
from pallas_kernels.online_softmax import OnlineSoftmax

# Keys read at a time. Inside a jit on 2 CPU cores, with B=1, K=2, G=4, D=128, T=1 and 1152 listed
# keys, a call takes 0.33 ms in chunks of 512, 0.30 of 600, 0.24 of 2048 (one read, no loop).
LIST_CHUNK = 2048
TAIL_CHUNK = 512


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
    list_chunk: int = LIST_CHUNK,
    tail_chunk: int = TAIL_CHUNK,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """See `pallas_kernels.sparse_attention`; `blocks` has one list for all KV heads or one each.

    Chunks are in keys. Trip counts are traced: the cost follows the longest list and the longest
    tail of the batch, not N or S.
    """
    tokens = q.shape[1]
    kv_heads, cache_rows = k.shape[1:3]
    list_size = blocks.shape[2]
    rows = online_softmax.pack_rows(q, kv_heads)
    state = online_softmax.start(rows)

    list_bound = -(-list_size // max(1, list_chunk // block_size))
    entries = -(-list_size // max(1, list_bound))  # of the list, a trip

    def attend_listed(i: Array, state: OnlineSoftmax) -> OnlineSoftmax:
        begin = jnp.minimum(i * entries, list_size - entries)  # the last trip may reach back
        entry = begin + jnp.arange(entries, dtype=jnp.int32)[None, None, :]
        used = (entry < counts[:, None, None]) & (entry >= i * entries)
        listed = lax.dynamic_slice_in_dim(blocks, begin, entries, axis=2)
        listed = jnp.where(used, listed, 0)
        keys, values = (read_blocks(x, listed, block_size) for x in (k, v))
        offset = jnp.arange(block_size, dtype=jnp.int32)[None, None, None, :]
        position = listed[..., None] * block_size + offset
        seen = used[..., None] & (position < tail_start[:, None, None, None])
        seen = seen.reshape(*listed.shape[:2], -1)
        logits = online_softmax.chunk_logits(rows, keys, scale)
        return online_softmax.accumulate(state, logits, seen[:, :, None, :], values, seen)

    tail_chunk = min(tail_chunk, max_tail)
    tail_bound = -(-max_tail // tail_chunk)
    length = lengths[:, None, None, None]
    last = length + online_softmax.token_of_row(rows.shape[2], tokens)  # row that a query stands at

    def attend_tail(i: Array, state: OnlineSoftmax) -> OnlineSoftmax:
        unseen = tail_start + i * tail_chunk
        begin = jnp.clip(unseen, 0, cache_rows - tail_chunk)
        keys, values = (read_ragged_rows(x, begin, tail_chunk) for x in (k, v))
        position = begin[:, None] + jnp.arange(tail_chunk, dtype=jnp.int32)[None, :]
        position = position[:, None, None, :]
        fresh = position >= unseen[:, None, None, None]  # the last trip may reach back
        visible = fresh & (position <= last)
        readable = (fresh & (position < length + tokens))[:, 0]
        logits = online_softmax.chunk_logits(rows, keys, scale)
        return online_softmax.accumulate(state, logits, visible, values, readable)

    state = _repeat(attend_listed, -(-counts.max() // max(1, entries)), list_bound, state)
    longest_tail = (lengths + tokens - tail_start).max()
    state = _repeat(attend_tail, -(-longest_tail // tail_chunk), tail_bound, state)
    return online_softmax.finish(state, tokens, q.dtype)


def _repeat(
    body: Callable[[Array, OnlineSoftmax], OnlineSoftmax],
    trips: Int[Array, ""],
    bound: int,
    state: OnlineSoftmax,
) -> OnlineSoftmax:
    """Runs `body` for `trips` <= `bound` trips; without a loop where one trip is the most."""
    if bound <= 1:
        return body(jnp.zeros((), jnp.int32), state) if bound else state
    return lax.fori_loop(0, jnp.minimum(trips, bound), body, state)
