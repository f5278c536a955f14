"""Vegas (arXiv 2602.07223): the last verification says which keys the next drafts need.

While full attention verifies a round, its logits score every key for free. The best-scored keys,
with every position too new to have been scored, are what the next round's drafts attend to.

Published form: single positions, no smoothing. Here positions may be ranked in aligned blocks and
their scores smoothed: a token that copies looks one position further each step, so a set of single
positions is stale three drafts later (docs/selection.md has the figures).
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from pallas_kernels import pool_scores
from vegas_jax.cache import KVCache
from vegas_jax.config import SpecConfig
from vegas_jax.drafters.selection import Selection, key_budget
from vegas_jax.model.config import ModelConfig
from vegas_jax.model.transformer import Attend
from vegas_jax.sharded_ops import gather_blocks, select_top_k, sparse_attention


def score_rows(spec: SpecConfig) -> str:
    """Rows whose key scores are collected; the last accepted row is known only afterwards."""
    return "each" if spec.score_rows == "last_accepted" else spec.score_rows


def max_blocks(spec: SpecConfig, rows: int) -> int:
    """Static bound on the blocks chosen in a cache of `rows` rows."""
    return -(-spec.max_selected(rows) // spec.sparse_block_size)


def init(spec: SpecConfig, config: ModelConfig, batch: int, rows: int) -> Selection:
    """An empty selection."""
    heads = (config.num_kv_heads,) if spec.per_kv_head else ()
    shape = (len(config.full_layers), batch, *heads, max_blocks(spec, rows))
    return Selection(
        jnp.zeros(shape, jnp.int32), jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32)
    )


def select(
    spec: SpecConfig,
    scores: tuple[Array, ...],
    lengths: Int[Array, "b"],
    accepted: Int[Array, "b"],
    kernels: str,
    mesh: Mesh | None,
) -> Selection:
    """Ranks the positions [0, lengths + 1), whole blocks only, and keeps the best per layer.

    scores: per layer [b, S / score_block], [b, K, S / score_block] with one set per KV head, or
    with a row axis after b when the rows are `last_accepted`. The number of keys is
    ceil(ratio * (lengths + 1)), at least min_tokens, at most what is ranked.
    """
    block, scored = spec.sparse_block_size, spec.score_block
    context = lengths + 1
    ranked = context // block * block
    if spec.score_rows == "last_accepted":
        row = jnp.expand_dims(accepted, range(1, scores[0].ndim))
        scores = tuple(jnp.take_along_axis(s, row, axis=1)[:, 0] for s in scores)
    # Pooling goes layer by layer, the ranking of all layers is one call.
    pooled = jnp.stack([block_scores(spec, s, ranked) for s in scores])  # [L, b, (K,) S / block]
    num_blocks = jnp.minimum(-(-key_budget(spec, context) // block), ranked // block)
    per_row = jnp.expand_dims(num_blocks, (0, *range(2, pooled.ndim - 1)))
    blocks, counts = select_top_k(
        pooled,
        jnp.broadcast_to(per_row, pooled.shape[:-1]),
        max_k=max_blocks(spec, scores[0].shape[-1] * scored),
        # The attention kernels' emulation is none of the selection.
        kernels="auto" if kernels == "interpret" else kernels,
        mesh=mesh,
    )
    first = counts[0] if counts.ndim == 2 else counts[0, :, 0]
    return Selection(blocks, first, ranked)


def block_scores(
    spec: SpecConfig, scores: Float[Array, "b *K S/score_block"], ranked: Int[Array, "b"]
) -> Float[Array, "b *K S/block"]:
    """What a layer's blocks are ranked by: its key scores, smoothed, then averaged by blocks.

    `ranked` is the number of ranked positions; -inf for the blocks from there on.
    """
    scored = spec.score_block
    back, ahead = (-(-reach // scored) for reach in spec.score_pool)
    limit = jnp.expand_dims(ranked // scored, range(1, scores.ndim - 1))
    block = spec.sparse_block_size // scored
    return pool_scores(scores, limit, pool=(back, ahead), block_size=block)


class Prepared(NamedTuple):
    """The round's selection, and its rows gathered where the attention op wants that."""

    selection: Selection
    gathered: tuple[Any, ...]


def prepare(
    spec: SpecConfig, selection: Selection, cache: KVCache, kernels: str, mesh: Mesh | None
) -> Prepared:
    """Gathers each layer's chosen blocks once for all draft steps."""
    gathered = tuple(
        gather_blocks(
            k,
            v,
            selection.blocks[layer],
            selection.counts,
            block_size=spec.sparse_block_size,
            kernels=kernels,
            mesh=mesh,
        )
        for layer, (k, v) in enumerate(cache.layers)
    )
    return Prepared(selection, gathered)


def attend(
    spec: SpecConfig,
    prepared: Prepared,
    lengths: Int[Array, "B"],
    step: Array,
    kernels: str,
    mesh: Mesh | None,
) -> Attend:
    """Attention over the chosen blocks and the tail, through the token's own position."""
    selection, gathered = prepared
    # After a round of gamma accepted drafts and gamma - 1 new ones, behind a block cut short.
    max_tail = 2 * spec.num_speculative_tokens + spec.sparse_block_size

    def attend_layer(
        layer: int, q: Array, k: Array, v: Array, sinks: Array | None
    ) -> tuple[Array, None]:
        out, _ = sparse_attention(
            q,
            k,
            v,
            selection.blocks[layer],
            selection.counts,
            lengths + step,
            block_size=spec.sparse_block_size,
            tail_start=selection.tail_start,
            max_tail=max_tail,
            sinks=sinks,
            gathered=gathered[layer],
            kernels=kernels,
            mesh=mesh,
        )
        return out, None

    return attend_layer
