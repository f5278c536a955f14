"""The meaning of `sparse_attention`: attention over the whole cache under a mask, float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """See `pallas_kernels.sparse_attention`; `blocks` has one list for all KV heads or one each."""
    del max_tail, gathered
    batch, tokens, heads, head_dim = q.shape
    kv_heads, cache_rows = k.shape[1:3]

    row = jnp.arange(cache_rows)
    used = jnp.arange(blocks.shape[2])[None, :] < counts[:, None]  # [B, N]
    named = blocks[..., None] == (row // block_size)[None, None, None, :]  # [B, K or 1, N, S]
    listed = jnp.any(named & used[:, None, :, None], axis=2)  # [B, K or 1, S]
    start = tail_start[:, None, None]
    end = lengths[:, None] + jnp.arange(tokens)[None, :]  # [B, T]
    tail = (row[None, None, :] >= start) & (row[None, None, :] <= end[:, :, None])  # [B, T, S]
    visible = listed[:, :, None, :] | tail[:, None, :, :]
    visible = jnp.broadcast_to(visible, (batch, kv_heads, tokens, cache_rows))

    seen = visible.any(axis=2)[..., None]  # [B, K, S, 1]
    keys, values = (jnp.where(seen, x.astype(jnp.float32), 0.0) for x in (k, v))
    queries = q.astype(jnp.float32).reshape(batch, tokens, kv_heads, -1, head_dim)
    logits = scale * jnp.einsum("btkgd,bksd->bktgs", queries, keys, precision="highest")
    logits = jnp.where(visible[:, :, :, None, :], logits, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=-1)
    if sinks is not None:
        lse = jnp.logaddexp(lse, sinks.reshape(1, kv_heads, 1, -1))
    weights = jnp.exp(logits - lse[..., None])
    out = jnp.einsum("bktgs,bksd->btkgd", weights, values, precision="highest")
    return out.reshape(q.shape).astype(q.dtype), lse.swapaxes(1, 2).reshape(batch, tokens, heads)
