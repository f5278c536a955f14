"""Grouped-query attention over one chunk of keys after another.

The running maximum, normaliser and value sum of FlashAttention (arXiv 2205.14135, section 3.1), in
float32. Query tokens and the query heads that share a KV head are packed into one axis of
R = T * G rows (row t * G + g), so that each key is read once for all of them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.precision import precision_of


class OnlineSoftmax(NamedTuple):
    """What is known of softmax(logits) @ values after the keys seen so far.

    Attributes:
      peak: largest logit.
      total: sum of exp(logit - peak).
      values: sum of exp(logit - peak) * value.
    """

    peak: Float[Array, "B K R"]
    total: Float[Array, "B K R"]
    values: Float[Array, "B K R D"]


def pack_rows(q: Float[Array, "B T H D"], kv_heads: int) -> Float[Array, "B K R D"]:
    """Packs query tokens and the heads of a group: [B, T, H, D] -> [B, K, T*G, D]."""
    batch, tokens, heads, head_dim = q.shape
    grouped = q.reshape(batch, tokens, kv_heads, heads // kv_heads, head_dim)
    return grouped.swapaxes(1, 2).reshape(batch, kv_heads, -1, head_dim)


def unpack_rows(rows: Float[Array, "B K R *D"], tokens: int) -> Float[Array, "B T H *D"]:
    """Undoes `pack_rows`, with any trailing axes."""
    batch, kv_heads, packed, *rest = rows.shape
    grouped = rows.reshape(batch, kv_heads, tokens, packed // tokens, *rest)
    return grouped.swapaxes(1, 2).reshape(batch, tokens, -1, *rest)


def token_of_row(packed: int, tokens: int) -> Int[Array, "1 1 R 1"]:
    """The query token of each packed row."""
    return (jnp.arange(packed, dtype=jnp.int32) // (packed // tokens))[None, None, :, None]


def start(rows: Float[Array, "B K R D"]) -> OnlineSoftmax:
    """The state before any key, for packed query rows.

    The first peak is finite, so that rows whose keys are all masked make no NaN.
    """
    return OnlineSoftmax(
        peak=jnp.full(rows.shape[:-1], jnp.finfo(jnp.float32).min, jnp.float32),
        total=jnp.zeros(rows.shape[:-1], jnp.float32),
        values=jnp.zeros(rows.shape, jnp.float32),
    )


def chunk_logits(
    rows: Float[Array, "B K R D"], keys: Float[Array, "B K C D"], scale: float
) -> Float[Array, "B K R C"]:
    """scale * q.k of a chunk of keys, float32."""
    return scale * _dot("bkrd,bksd->bkrs", rows, keys)


def accumulate(
    state: OnlineSoftmax, logits: Float[Array, "B K R C"], values: Float[Array, "B K C D"]
) -> OnlineSoftmax:
    """Takes in a chunk of keys that every row sees; -inf logits count for nothing."""
    peak = jnp.maximum(state.peak, logits.max(axis=-1))
    decay = jnp.exp(state.peak - peak)
    weights = jnp.exp(logits - peak[..., None])
    added = _dot("bkrs,bksd->bkrd", weights.astype(values.dtype), values)
    return OnlineSoftmax(
        peak=peak,
        total=state.total * decay + weights.sum(axis=-1),
        values=state.values * decay[..., None] + added,
    )


def accumulate_masked(
    state: OnlineSoftmax,
    logits: Float[Array, "B K R C"],
    visible: Bool[Array, "#B #K #R C"],
    values: Float[Array, "B K C D"],
    readable: Bool[Array, "#B #K C"],
) -> OnlineSoftmax:
    """Takes in a chunk of keys that not every row sees.

    Args:
      state: of the chunks before.
      logits: float32, anything where a row must not see the key.
      visible: which keys each row sees.
      values: of the keys.
      readable: where `values` holds real values: the others are cleared, since 0 * NaN is NaN.
    """
    logits = jnp.where(visible, logits, -jnp.inf)
    values = jnp.where(readable[..., None], values, jnp.zeros((), values.dtype))
    return accumulate(state, logits, values)


def accumulate_sinks(state: OnlineSoftmax, sinks: Float[Array, " H"], tokens: int) -> OnlineSoftmax:
    """Takes in, for each query head, a logit that has no value."""
    _, kv_heads, packed, _ = state.values.shape
    sinks = jnp.tile(sinks.reshape(kv_heads, packed // tokens), (1, tokens))[None]
    peak = jnp.maximum(state.peak, sinks)
    decay = jnp.exp(state.peak - peak)
    return OnlineSoftmax(
        peak=peak,
        total=state.total * decay + jnp.exp(sinks - peak),
        values=state.values * decay[..., None],
    )


def where(choose: Bool[Array, " B"], state: OnlineSoftmax, other: OnlineSoftmax) -> OnlineSoftmax:
    """`state` for the chosen sequences, `other` for the rest."""
    return jax.tree.map(
        lambda x, y: jnp.where(jnp.expand_dims(choose, range(1, x.ndim)), x, y), state, other
    )


def log_sum_exp(state: OnlineSoftmax) -> Float[Array, "B K R"]:
    """Log of the sum of exp(logit), -inf for rows that saw no key."""
    return state.peak + jnp.log(state.total)


def finish(
    state: OnlineSoftmax, tokens: int, dtype: DTypeLike
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Attention output in `dtype` (0 for rows that saw no key), and float32 log-sum-exp."""
    out = state.values / jnp.where(state.total > 0, state.total, 1.0)[..., None]
    return unpack_rows(out, tokens).astype(dtype), unpack_rows(log_sum_exp(state), tokens)


def _dot(subscripts: str, x: Array, y: Array) -> Array:
    precision = precision_of(x.dtype)
    return jnp.einsum(subscripts, x, y, precision=precision, preferred_element_type=jnp.float32)
