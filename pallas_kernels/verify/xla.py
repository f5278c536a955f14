"""`verify_attention` for any platform: a loop over chunks of cache rows."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import online_softmax
from pallas_kernels.cache_reads import read_ragged_rows, read_rows
from pallas_kernels.online_softmax import OnlineSoftmax
from pallas_kernels.verify.key_scores import KeyScores

EDGE = 512  # cache rows read at a time where masks are needed


def chunk_size(packed_rows: int) -> int:
    """Cache rows read at a time, for R = T * G packed query rows per KV head.

    It does not depend on the batch size, so that neither does the order of a sequence's sums.
    """
    # In ms on 2 CPU cores, S=16384, K=2, G=4, D=128, chunks of 512 / 1024 / 2048: B=1: 4.4 / 3.0 /
    # 3.0 (T=1), 10.1 / 7.9 / 6.4 (T=7), 549 / 584 / - (T=512); B=8: 86 / 62 / 80 (T=7).
    return 2048 if packed_rows <= 128 else 512


Carry = tuple[OnlineSoftmax, Array | None]


def verify_attention(
    q: Float[Array, "b T H D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    lengths: Int[Array, " b"],
    slots: Int[Array, " b"] | None,
    key_scores: KeyScores | None,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " H"] | None = None,
    chunk: int | None = None,
) -> tuple[Float[Array, "b T H D"], Float[Array, "b T H"], Float[Array, "b *rest S/block"] | None]:
    """See `pallas_kernels.verify_attention`; `chunk` cache rows are read at a time.

    Each sequence goes through the whole chunks that all of its queries see, without any mask, and
    then through its edge, from there to its last row, in smaller masked pieces. Trip counts are
    traced: the cost follows the longest sequence, not S. Only the scores' buffer grows with S: for
    mode "weight" it holds the chosen rows' logits until their log-sum-exp is known.
    """
    tokens = q.shape[1]
    kv_heads, cache_rows = k.shape[1:3]
    rows = online_softmax.pack_rows(q, kv_heads)
    packed = rows.shape[2]
    block = 1 if key_scores is None else key_scores.block
    chunk = _whole_blocks(min(chunk or chunk_size(packed), cache_rows), block)
    edge = min(_whole_blocks(EDGE, block), chunk)
    whole_chunks = jnp.minimum(lengths + 1, cache_rows) // chunk  # a first query sees lengths + 1
    edge_start = whole_chunks * chunk
    if window is not None:  # all masked, from the first key that a query sees
        whole_chunks = jnp.zeros_like(whole_chunks)
        edge_start = jnp.maximum(lengths + 1 - window, 0)
    length = lengths[:, None, None, None]
    limit = length + online_softmax.token_of_row(packed, tokens) + 1  # a row sees the keys below

    def note(noted: Array | None, logits: Array, begin: Array) -> Array | None:
        if key_scores is None or noted is None:
            return None
        entry = begin if key_scores.mode == "weight" else begin // key_scores.block
        return _put(noted, key_scores.note(_ungroup(logits, tokens)), entry)

    def attend_whole(i: Array, carry: Carry) -> Carry:
        state, noted = carry
        begin = i * chunk
        keys, values = (read_rows(x, slots, begin, chunk) for x in (k, v))
        logits = online_softmax.chunk_logits(rows, keys, scale)
        after = online_softmax.accumulate(state, logits, values)
        # Sequences that are through stand still; what they noted here their edge overwrites.
        state = online_softmax.where(i < whole_chunks, after, state)
        return state, note(noted, logits, begin)

    def attend_edge(i: Array, carry: Carry) -> Carry:
        state, noted = carry
        unseen = edge_start + i * edge
        begin = jnp.minimum(unseen, cache_rows - edge)  # the last piece may reach back
        keys, values = (read_ragged_rows(x, slots, begin, edge) for x in (k, v))
        logits = online_softmax.chunk_logits(rows, keys, scale)
        position = begin[:, None, None, None] + jnp.arange(edge, dtype=jnp.int32)[None, None, None]
        fresh = position >= unseen[:, None, None, None]
        visible = fresh & (position < limit)
        if window is not None:
            visible &= position >= limit - window
        readable = (fresh & (position < length + tokens))[:, 0]
        state = online_softmax.accumulate_masked(state, logits, visible, values, readable)
        return state, note(noted, logits, begin)

    noted = None
    if key_scores is not None:
        shape = key_scores.noted_shape(rows.shape[0], kv_heads, packed // tokens, cache_rows)
        noted = jnp.zeros(shape, jnp.float32)
    carry = (online_softmax.start(rows), noted)
    carry = lax.fori_loop(0, whole_chunks.max(), attend_whole, carry)
    longest_edge = (jnp.minimum(lengths + tokens, cache_rows) - edge_start).max()
    state, noted = lax.fori_loop(0, -(-longest_edge // edge), attend_edge, carry)
    if sinks is not None:
        state = online_softmax.accumulate_sinks(state, sinks, tokens)
    out, lse = online_softmax.finish(state, tokens, q.dtype)
    if key_scores is None or noted is None:
        return out, lse, None

    scores = noted
    if key_scores.mode == "weight":
        row_lse = _ungroup(online_softmax.log_sum_exp(state)[..., None], tokens)
        row_lse = key_scores.choose_rows(row_lse)

        def weigh(i: Array, scores: Array) -> Array:
            begin = jnp.minimum(i * chunk, cache_rows - chunk)
            logits = lax.dynamic_slice_in_dim(noted, begin, chunk, axis=-1)
            weights = key_scores.average(jnp.exp(logits - row_lse))
            return _put(scores, weights, begin // key_scores.block)

        num_chunks = -(-jnp.minimum(lengths.max() + 1, cache_rows) // chunk)
        shape = key_scores.shape(rows.shape[0], kv_heads, cache_rows)
        scores = lax.fori_loop(0, num_chunks, weigh, jnp.zeros(shape, jnp.float32))

    return out, lse, key_scores.mask(scores, lengths)


def _whole_blocks(rows: int, block: int) -> int:
    """`rows` rounded down to whole blocks of keys that are scored together, one at least."""
    return max(1, rows // block) * block


def _ungroup(x: Float[Array, "b K R C"], tokens: int) -> Float[Array, "b K T G C"]:
    """Splits packed rows into query tokens and the heads of a group."""
    return x.reshape(*x.shape[:2], tokens, x.shape[2] // tokens, x.shape[3])


def _put(whole: Array, part: Array, begin: Int[Array, "*b"]) -> Array:
    """Writes `part` at `begin` of the last axis, the same for all sequences or one for each."""
    if begin.ndim:
        return jax.vmap(_put)(whole, part, begin)
    return lax.dynamic_update_slice_in_dim(whole, part, begin, axis=-1)
