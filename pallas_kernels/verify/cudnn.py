"""`verify_attention` for prefill: many query tokens, through cuDNN's flash attention.

cuDNN aligns a causal mask with the top left corner, so T tokens against a longer cache are not one
causal call. They are two: the past (the rows below `lengths`, no causal mask) and the chunk itself
(T rows, causal), combined by their log-sum-exp as in Flash-Decoding (Dao et al., 2023). With a
`window` they are one: the few rows that the window reaches and the chunk are copied side by side.

What is copied. Past keys and values are read where they are, [B, K, S, D]; with `slots`, as pages
of the cache that a page table names. The chunk's T rows (and a window's) are copied, for they start
at any row. No mask is an array.

What cuDNN may read. It takes keys in tiles from row 0 on, gives those past a sequence's end the
weight 0, and multiplies that with the values. So the past's last tile may read rows from `lengths`
on, and they must be finite: with at least as many query tokens as a tile has keys, they are the
chunk's own. That a tile has at most 128 keys is an assumption, since cuDNN does not document it.
The copied parts end where their arrays do.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.cache_reads import read_ragged_rows
from pallas_kernels.verify.key_scores import KeyScores

MIN_TOKENS = 128  # the longest tile of keys, as assumed above
MAX_HEAD_DIM = 128  # on every GPU that cuDNN's flash attention runs on; Hopper has up to 256
PAGE = 128  # cache rows; a tile never needs two pages

Part = tuple[Float[Array, "b H T D"], Float[Array, "b H T"]]  # output, log-sum-exp (float32)


def refuses(
    q: Array,
    k: Array,
    v: Array,
    lengths: Array,
    slots: Array | None,
    key_scores: KeyScores | None,
    scale: float,
    window: int | None = None,
    sinks: Array | None = None,
) -> str | None:
    """Why the arguments are outside what cuDNN serves, or serves well."""
    batch, tokens, _, head_dim = q.shape
    cache_batch, _, cache_rows, _ = k.shape
    if key_scores is not None:
        return "`scores` must be None"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"`q` must be bfloat16 or float16, but is {q.dtype},"
    if head_dim > MAX_HEAD_DIM or head_dim % 8:
        return (
            f"`q` must have a head_dim that is a multiple of 8 up to {MAX_HEAD_DIM}, "
            f"but has {head_dim},"
        )
    if tokens < MIN_TOKENS:
        return f"`q` must have at least {MIN_TOKENS} query tokens, but has {tokens},"
    if window is not None and tokens < window < cache_rows:
        # The window's rows are as many rows of padding in the queries.
        return f"`window` must be at most the {tokens} query tokens, but is {window},"
    if slots is not None:
        if cache_rows % PAGE:
            return f"`k` must have a multiple of {PAGE} cache rows, but has {cache_rows},"
        if batch > cache_batch or cache_batch * (cache_rows // PAGE) % batch:
            return (
                f"`slots` must be at most the {cache_batch} sequences of the cache and divide its "
                f"{cache_batch * (cache_rows // PAGE)} pages of {PAGE} rows, but are {batch},"
            )
    return None


def flash_attention(
    q: Float[Array, "b H T D"],
    k: Float[Array, "P K S D"],
    v: Float[Array, "P K S D"],
    scale: float,
    *,
    lengths: Int[Array, " b"] | None = None,
    pages: Int[Array, "b N"] | None = None,
    window: int | None = None,
) -> Part:
    """Attention by cuDNN, in the arrays' own layout and with the log-sum-exp.

    `jax.nn.dot_product_attention` wraps the same functions, but takes [b, T, H, D] alone, which a
    cache would have to be transposed to; rounds the log-sum-exp to q's dtype, 8 bits of a bfloat16,
    which is an error of percents in a part's weight; and knows no pages.

    Args:
      q: queries; query head h attends to KV head h // (H / K).
      k: keys, one array per sequence (P = b), or pages of S rows.
      v: values, likewise.
      scale: factor on q.k.
      lengths: every query sees so many keys, at least 1. None: query t sees the keys 0 .. t.
      pages: for each sequence its pages in order, at least as many as `lengths` reaches into; the
        others may be any. b * N = P, or jax's `paged_attention` refuses. Only with `lengths`.
      window: a query sees only the last `window` keys, its own included; only without `lengths`.
    """
    # Not part of JAX's public interface, so not imported before it is needed.
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    options: dict[str, Any] = {"scale": scale, "qkv_layout": "BNTH", "return_residual": True}
    if lengths is None:
        options |= {"mask_type": cudnn.MaskType.CAUSAL, "sliding_window_length": window}
        return cudnn.dot_product_attention(q, k, v, **options)
    options |= {
        "mask_type": cudnn.MaskType.PADDING,
        "q_seqlen": jnp.full_like(lengths, q.shape[2]),
        "kv_seqlen": lengths,
    }
    if pages is None:
        return cudnn.dot_product_attention(q, k, v, **options)
    table = pages[:, None, :, None]
    return cudnn.paged_attention(q, k, v, page_table_k=table, page_table_v=table, **options)


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
    attend: Callable[..., Part] = flash_attention,
) -> tuple[Float[Array, "b T H D"], Float[Array, "b T H"], None]:
    """See `pallas_kernels.verify_attention`; `attend` does what `flash_attention` does."""
    queries = q.swapaxes(1, 2)
    if window is None or window >= k.shape[2]:
        parts = [
            _attend_past(queries, k, v, lengths, slots, scale, attend),
            _attend_chunk(queries, k, v, lengths, slots, scale, attend),
        ]
    else:
        parts = [_attend_window(queries, k, v, lengths, slots, scale, window, attend)]
    logs = [log for _, log in parts]
    if sinks is not None:
        logs.append(jnp.broadcast_to(sinks[None, :, None], logs[0].shape))
    lse = functools.reduce(jnp.logaddexp, logs)
    weighted = [jnp.exp(log - lse)[..., None] * out.astype(jnp.float32) for out, log in parts]
    out = sum(weighted[1:], weighted[0]).astype(q.dtype)
    return out.swapaxes(1, 2), lse.swapaxes(1, 2), None


def _attend_past(
    queries: Float[Array, "b H T D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    lengths: Int[Array, " b"],
    slots: Int[Array, " b"] | None,
    scale: float,
    attend: Callable[..., Part],
) -> Part:
    """Attention to the rows below `lengths`; a log-sum-exp of -inf where there are none."""
    # What cuDNN makes of a sequence without keys is not documented: it gets row 0, of the chunk.
    seen = jnp.maximum(lengths, 1)
    if slots is None:
        out, lse = attend(queries, k, v, scale, lengths=seen)
    else:
        # A page is a piece of one KV head's rows: to cuDNN each KV head is a sequence of its own.
        batch, heads, tokens, head_dim = queries.shape
        cache_batch, kv_heads, cache_rows, _ = k.shape
        k, v = (x.reshape(-1, 1, PAGE, head_dim) for x in (k, v))
        out, lse = attend(
            queries.reshape(batch * kv_heads, heads // kv_heads, tokens, head_dim),
            k,
            v,
            scale,
            lengths=jnp.repeat(seen, kv_heads),
            pages=_pages(slots, cache_batch, kv_heads, cache_rows // PAGE),
        )
        out, lse = out.reshape(queries.shape), lse.reshape(queries.shape[:3])
    return out, jnp.where(lengths[:, None, None] > 0, lse, -jnp.inf)


def _pages(
    slots: Int[Array, " b"], cache_batch: int, kv_heads: int, pages: int
) -> Int[Array, "b*K N"]:
    """The pages of each KV head of each slot, over and over up to the width that jax asks for."""
    width = cache_batch * pages // slots.shape[0]
    first = slots[:, None] * kv_heads + jnp.arange(kv_heads, dtype=slots.dtype)[None]
    entry = jnp.arange(width, dtype=slots.dtype) % pages
    return first.reshape(-1, 1) * pages + entry[None]


def _attend_chunk(
    queries: Float[Array, "b H T D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    lengths: Int[Array, " b"],
    slots: Int[Array, " b"] | None,
    scale: float,
    attend: Callable[..., Part],
) -> Part:
    """Attention of the new tokens to one another."""
    keys, values = (read_ragged_rows(x, slots, lengths, queries.shape[2]) for x in (k, v))
    return attend(queries, keys, values, scale)


def _attend_window(
    queries: Float[Array, "b H T D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    lengths: Int[Array, " b"],
    slots: Int[Array, " b"] | None,
    scale: float,
    window: int,
    attend: Callable[..., Part],
) -> Part:
    """Attention to the last `window` rows: self-attention of these rows and the chunk.

    The queries are padded to stand at their own rows, so that both masks are aligned.
    """
    batch, heads, tokens, head_dim = queries.shape
    size = min(window - 1 + tokens, k.shape[2])
    begin = jnp.clip(lengths - (window - 1), 0, k.shape[2] - size)
    before = lengths - begin
    row = jnp.arange(size, dtype=lengths.dtype)[None, None, :, None]
    written = row < (before + tokens)[:, None, None, None]
    keys, values = (read_ragged_rows(x, slots, begin, size) for x in (k, v))
    keys, values = (jnp.where(written, x, jnp.zeros((), x.dtype)) for x in (keys, values))

    padded = jnp.zeros((batch, heads, size, head_dim), queries.dtype)
    padded = jax.vmap(lambda x, q, at: lax.dynamic_update_slice_in_dim(x, q, at, axis=1))(
        padded, queries, before
    )
    out, lse = attend(padded, keys, values, scale, window=window)
    take = jax.vmap(lambda x, at: lax.dynamic_slice_in_dim(x, at, tokens, axis=1))
    return take(out, before), take(lse, before)
