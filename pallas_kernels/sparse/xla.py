"""`sparse_attention` for any platform: gathers the listed blocks, attends to them and a tail."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

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

State = TypeVar("State")


class GatheredBlocks(NamedTuple):
    """The rows of the listed blocks side by side; values of entries that do not count are 0."""

    k: Float[Array, "B K N*block_size D"]
    v: Float[Array, "B K N*block_size D"]


def gather_blocks(
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    blocks: Int[Array, "B heads N"],
    counts: Int[Array, " B"],
    block_size: int,
    chunk: int = LIST_CHUNK,
) -> GatheredBlocks:
    """See `pallas_kernels.gather_blocks`; the trip count follows the longest list."""
    batch, kv_heads, _, head_dim = k.shape
    size = blocks.shape[2]
    bound, entries = _split(size, chunk // block_size)

    def gather(i: Array, gathered: GatheredBlocks) -> GatheredBlocks:
        begin = jnp.minimum(i * entries, size - entries)  # the last trip may reach back
        read = _read_listed(k, v, blocks, counts, begin, entries, block_size)
        return read if bound == 1 else GatheredBlocks(*map(put, gathered, read, (begin, begin)))

    def put(whole: Array, part: Array, begin: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(whole, part, begin * block_size, axis=2)

    shape = (batch, kv_heads, size * block_size, head_dim)
    empty = GatheredBlocks(jnp.zeros(shape, k.dtype), jnp.zeros(shape, v.dtype))
    return _repeat(gather, -(-counts.max() // entries), bound, empty)


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
    gathered: GatheredBlocks | None = None,
    list_chunk: int = LIST_CHUNK,
    tail_chunk: int = TAIL_CHUNK,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """See `pallas_kernels.sparse_attention`; `blocks` has one list for all KV heads or one each.

    Chunks are in keys. Trip counts are traced: the cost follows the longest list and the longest
    tail of the batch, not N or S.
    """
    tokens = q.shape[1]
    kv_heads, cache_rows = k.shape[1:3]
    rows = online_softmax.pack_rows(q, kv_heads)
    state = online_softmax.start(rows)
    size = blocks.shape[2]
    list_bound, entries = _split(size, list_chunk // block_size)

    def attend_listed(i: Array, state: OnlineSoftmax) -> OnlineSoftmax:
        begin = jnp.minimum(i * entries, size - entries)  # the last trip may reach back
        if gathered is None:
            listed = _read_listed(k, v, blocks, counts, begin, entries, block_size)
        elif list_bound == 1:
            listed = gathered
        else:
            listed = GatheredBlocks(*(slice_of(x, begin) for x in gathered))
        entry = begin + jnp.arange(entries, dtype=jnp.int32)[None, :]
        used = (entry < counts[:, None]) & (entry >= i * entries)
        used = jnp.repeat(used, block_size, axis=1)[:, None, None, :]
        logits = jnp.where(used, online_softmax.chunk_logits(rows, listed.k, scale), -jnp.inf)
        return online_softmax.accumulate(state, logits, listed.v)

    def slice_of(x: Array, begin: Array) -> Array:
        return lax.dynamic_slice_in_dim(x, begin * block_size, entries * block_size, axis=2)

    tail_chunk = min(tail_chunk, max_tail)
    tail_bound = -(-max_tail // tail_chunk)
    length = lengths[:, None, None, None]
    last = length + online_softmax.token_of_row(rows.shape[2], tokens)  # row that a query stands at

    def attend_tail(i: Array, state: OnlineSoftmax) -> OnlineSoftmax:
        unseen = tail_start + i * tail_chunk
        begin = jnp.clip(unseen, 0, cache_rows - tail_chunk)
        keys, values = (read_ragged_rows(x, None, begin, tail_chunk) for x in (k, v))
        position = begin[:, None] + jnp.arange(tail_chunk, dtype=jnp.int32)[None, :]
        position = position[:, None, None, :]
        fresh = position >= unseen[:, None, None, None]  # the last trip may reach back
        visible = fresh & (position <= last)
        readable = (fresh & (position < length + tokens))[:, 0]
        logits = online_softmax.chunk_logits(rows, keys, scale)
        return online_softmax.accumulate_masked(state, logits, visible, values, readable)

    state = _repeat(attend_listed, -(-counts.max() // entries), list_bound, state)
    longest_tail = (lengths + tokens - tail_start).max()
    state = _repeat(attend_tail, -(-longest_tail // tail_chunk), tail_bound, state)
    if sinks is not None:
        state = online_softmax.accumulate_sinks(state, sinks, tokens)
    return online_softmax.finish(state, tokens, q.dtype)


def _read_listed(
    k: Array,
    v: Array,
    blocks: Int[Array, "B heads N"],
    counts: Int[Array, " B"],
    begin: Int[Array, ""],
    entries: int,
    block_size: int,
) -> GatheredBlocks:
    """The rows of entries begin .. begin+entries-1 of the list."""
    entry = begin + jnp.arange(entries, dtype=jnp.int32)[None, None, :]
    used = entry < counts[:, None, None]
    listed = jnp.where(used, lax.dynamic_slice_in_dim(blocks, begin, entries, axis=2), 0)
    keys, values = (read_blocks(x, listed, block_size) for x in (k, v))
    # What an entry that does not count points at may hold anything, and 0 * NaN is NaN.
    readable = jnp.repeat(used, block_size, axis=2)[..., None]
    return GatheredBlocks(keys, jnp.where(readable, values, jnp.zeros((), v.dtype)))


def _split(size: int, most: int) -> tuple[int, int]:
    """The fewest trips of at most `most` that go through `size`, and how much each takes."""
    trips = -(-size // max(1, most))
    return trips, -(-size // max(1, trips)) or 1


def _repeat(
    body: Callable[[Array, State], State], trips: Int[Array, ""], bound: int, state: State
) -> State:
    """Runs `body` for `trips` <= `bound` trips; without a loop where one trip is the most."""
    if bound <= 1:
        return body(jnp.zeros((), jnp.int32), state) if bound else state
    return lax.fori_loop(0, jnp.minimum(trips, bound), body, state)
