"""The chosen keys that one verification hands to the next round's drafts."""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from vegas_jax.config import SpecConfig


def key_budget(spec: SpecConfig, context: Int[Array, "B"]) -> Int[Array, "B"]:
    """Keys that a sparse draft step may attend to: max(ceil(ratio * context), min_tokens)."""
    share = jnp.ceil(jnp.float32(spec.sparse_ratio) * context.astype(jnp.float32))
    return jnp.maximum(share.astype(jnp.int32), spec.sparse_min_tokens)


class Selection(struct.PyTreeNode):
    """Blocks of cache rows per layer and sequence, and where the always-kept tail begins.

    Attributes:
      blocks: [L, B, N], or [L, B, K, N] with one set per KV head, for the L layers that attend to
        the whole context: block indices (position // block size), ascending; only the first
        `counts` mean anything.
      counts: [B], blocks chosen (the same number in every layer and head).
      tail_start: [B], every position from here on is attended to: none of them could be ranked.
        All chosen blocks lie below, so no position is seen twice.
    """

    blocks: Int[Array, "L B *K N"]
    counts: Int[Array, "B"]
    tail_start: Int[Array, "B"]

    def put(self, slots: Int[Array, "b"], rows: "Selection") -> "Selection":
        """Replaces the sequences `slots` by those of `rows`."""
        return Selection(
            self.blocks.at[:, slots].set(rows.blocks),
            self.counts.at[slots].set(rows.counts),
            self.tail_start.at[slots].set(rows.tail_start),
        )

    def keep_where(self, keep: Bool[Array, "B"], other: "Selection") -> "Selection":
        """This selection where `keep`, `other` elsewhere."""
        wide = jnp.expand_dims(keep, (0, *range(2, self.blocks.ndim)))
        return Selection(
            jnp.where(wide, self.blocks, other.blocks),
            jnp.where(keep, self.counts, other.counts),
            jnp.where(keep, self.tail_start, other.tail_start),
        )
