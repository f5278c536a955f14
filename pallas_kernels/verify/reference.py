"""The meaning of `verify_attention`: every key's logit at once, float32, direct masks."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.verify.key_scores import KeyScores


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
) -> tuple[Float[Array, "b T H D"], Float[Array, "b T H"], Float[Array, "b *rest S/block"] | None]:
    """See `pallas_kernels.verify_attention`."""
    batch, tokens, heads, head_dim = q.shape
    kv_heads, cache_rows = k.shape[1:3]
    k, v = (x if slots is None else x[slots] for x in (k, v))

    queries = q.astype(jnp.float32).reshape(batch, tokens, kv_heads, -1, head_dim)
    row = jnp.arange(cache_rows)[None, None, :]  # [1, 1, S]
    written = row < lengths[:, None, None] + tokens  # [b, 1, S]
    keys, values = (jnp.where(written[..., None], x.astype(jnp.float32), 0.0) for x in (k, v))

    logits = scale * jnp.einsum("btkgd,bksd->btkgs", queries, keys, precision="highest")
    position = lengths[:, None, None] + jnp.arange(tokens)[None, :, None]  # [b, T, 1]
    visible = row <= position  # [b, T, S]
    if window is not None:
        visible &= row > position - window
    masked = jnp.where(visible[:, :, None, None, :], logits, -jnp.inf)
    lse = jax.nn.logsumexp(masked, axis=-1)
    if sinks is not None:
        lse = jnp.logaddexp(lse, sinks.reshape(1, 1, kv_heads, -1))
    weights = jnp.exp(masked - lse[..., None])
    out = jnp.einsum("btkgs,bksd->btkgd", weights, values, precision="highest")
    out, lse = out.reshape(q.shape).astype(q.dtype), lse.reshape(batch, tokens, heads)
    if key_scores is None:
        return out, lse, None

    scores = logits if key_scores.mode == "logit" else weights
    scores = scores[:, jnp.array(key_scores.rows)].mean(axis=3)  # [b, R, K, S]
    if not key_scores.per_kv_head:
        scores = scores.mean(axis=2)
    if key_scores.average_rows:
        scores = scores.mean(axis=1)
    block = key_scores.block
    scores = scores.reshape(*scores.shape[:-1], -1, block).mean(axis=-1)
    end = block * (1 + jnp.arange(cache_rows // block)[None, :])
    scored = end <= lengths[:, None] + 1  # [b, S / block]
    scored = scored.reshape(batch, *(1,) * (scores.ndim - 2), -1)
    return out, lse, jnp.where(scored, scores, 0.0)
