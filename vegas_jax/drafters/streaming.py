"""MagicDec-Stream (arXiv 2408.11049): attention sinks plus a recent window.

In its fair form: no second cache, the target's keys and values at their true positions, and the
window moves with every draft step. Its budget is that of the other sparse drafters,
max(ceil(ratio * length), min_tokens) keys, sinks included.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Int

from vegas_jax.cache import KVCache
from vegas_jax.config import SpecConfig
from vegas_jax.drafters.selection import key_budget
from vegas_jax.model.config import ModelConfig
from vegas_jax.model.transformer import Attend
from vegas_jax.sharded_ops import gather_blocks, sparse_attention

SINKS = 16


def score_rows(spec: SpecConfig) -> None:
    """No scores are needed."""


def init(spec: SpecConfig, config: ModelConfig, batch: int, rows: int) -> None:
    """Nothing is handed on."""


def select(
    spec: SpecConfig,
    scores: tuple,
    lengths: Array,
    accepted: Array,
    kernels: str,
    mesh: Mesh | None,
) -> None:
    """Nothing is chosen: the window follows from the length."""


class Prepared(NamedTuple):
    """A list of positions such that every step of a round attends to the first so many.

    The sinks, then the window from its newest position back: as it moves on, the oldest drop out.
    """

    positions: Int[Array, "B N"]
    gathered: tuple[Any, ...]


def prepare(
    spec: SpecConfig, selection: None, cache: KVCache, kernels: str, mesh: Mesh | None
) -> Prepared:
    """Gathers sinks and window once for all draft steps."""
    entry = jnp.arange(spec.max_selected(cache.rows), dtype=jnp.int32)[None, :]
    newest = cache.lengths[:, None] - 1
    positions = jnp.where(entry < SINKS, entry, newest - (entry - SINKS))
    counts, _ = window(spec, cache.lengths, jnp.int32(0))
    gathered = tuple(
        gather_blocks(k, v, positions, counts, block_size=1, kernels=kernels, mesh=mesh)
        for k, v in cache.layers
    )
    return Prepared(positions, gathered)


def window(
    spec: SpecConfig, lengths: Int[Array, "B"], step: Array
) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
    """How many of the listed positions a step attends to, and where its tail starts."""
    context = lengths + step + 1
    start = context - jnp.maximum(key_budget(spec, context) - SINKS, 1)
    # Where window and sinks would touch there is nothing between them to leave out.
    has_gap = (start > SINKS) & (lengths >= SINKS)
    counts = jnp.where(has_gap, SINKS + jnp.maximum(lengths - start, 0), lengths)
    return counts, jnp.where(has_gap, jnp.maximum(start, lengths), lengths)


def attend(
    spec: SpecConfig,
    prepared: Prepared,
    lengths: Int[Array, "B"],
    step: Array,
    kernels: str,
    mesh: Mesh | None,
) -> Attend:
    """Attention over the first 16 positions and the most recent ones, the token's own included."""
    counts, tail_start = window(spec, lengths, step)

    def attend_layer(
        layer: int, q: Array, k: Array, v: Array, sinks: Array | None
    ) -> tuple[Array, None]:
        out, _ = sparse_attention(
            q,
            k,
            v,
            prepared.positions,
            counts,
            lengths + step,
            block_size=1,
            tail_start=tail_start,
            max_tail=spec.num_speculative_tokens,
            sinks=sinks,
            gathered=prepared.gathered[layer],
            kernels=kernels,
            mesh=mesh,
        )
        return out, None

    return attend_layer
