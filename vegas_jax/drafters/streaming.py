"""MagicDec-Stream (arXiv 2408.11049): attention sinks plus a recent window.

In its fair form: no second cache, the target's keys and values at their true positions, and the
window moves with every draft step. Its budget is that of the other sparse drafters,
max(ceil(ratio * length), min_tokens) keys, sinks included.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels import sparse_attention
from vegas_jax.config import ModelConfig, SpecConfig
from vegas_jax.model.transformer import Attend

SINKS = 16


def score_rows(spec: SpecConfig) -> None:
    """No scores are needed."""


def init(spec: SpecConfig, config: ModelConfig, batch: int, rows: int) -> None:
    """Nothing is handed on."""


def select(spec: SpecConfig, scores: tuple, lengths: Array, accepted: Array) -> None:
    """Nothing is chosen: the window follows from the length."""


def attend(spec: SpecConfig, selection: None, lengths: Int[Array, "B"], kernels: str) -> Attend:
    """Attention over the first 16 positions and the most recent ones, the token's own included."""
    context = lengths + 1
    budget = jnp.ceil(jnp.float32(spec.sparse_ratio) * context.astype(jnp.float32))
    budget = jnp.maximum(budget.astype(jnp.int32), spec.sparse_min_tokens)
    window_start = context - jnp.maximum(budget - SINKS, 1)
    # Where window and sinks would touch there is nothing between them to leave out.
    has_gap = window_start > SINKS
    tail_start = jnp.where(has_gap, window_start, 0)
    sinks = jnp.zeros((lengths.shape[0], 1), jnp.int32)

    def attend_layer(layer: int, q: Array, k: Array, v: Array) -> tuple[Array, None]:
        max_tail = max(spec.max_selected(k.shape[2]), 2 * SINKS)
        out, _ = sparse_attention(
            q,
            k,
            v,
            sinks,
            has_gap.astype(jnp.int32),
            lengths,
            block_size=SINKS,
            tail_start=tail_start,
            max_tail=max_tail,
            kernels=kernels,
        )
        return out, None

    return attend_layer
