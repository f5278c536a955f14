"""The meaning of `select_top_k`: a stable sort, cut at k and sorted by position."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def select_top_k(
    scores: Float[Array, "*rest M"], k: Int[Array, "*rest"], max_k: int
) -> tuple[Int[Array, "*rest max_k"], Int[Array, "*rest"]]:
    """See `pallas_kernels.select_top_k`; scores are float32."""
    *rest, size = scores.shape
    scores = jnp.where(jnp.abs(scores) < jnp.finfo(jnp.float32).tiny, 0.0, scores)
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    order = jnp.argsort(-scores, axis=-1, stable=True).astype(jnp.int32)
    candidates = (scores > -jnp.inf).sum(axis=-1, dtype=jnp.int32)
    counts = jnp.clip(k, 0, jnp.minimum(candidates, max_k))
    rank = jnp.arange(size).reshape(*(1,) * len(rest), size)
    positions = jnp.sort(jnp.where(rank < counts[..., None], order, size), axis=-1)
    positions = jnp.where(positions == size, 0, positions)[..., :max_k]
    return jnp.pad(positions, [(0, 0)] * len(rest) + [(0, max(0, max_k - size))]), counts
