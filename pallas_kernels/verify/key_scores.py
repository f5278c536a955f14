"""Which attention rows score the keys, and how."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

SCORES = ("first+last", "all", "last", "each")
SCORE_MODES = ("weight", "logit")


@dataclasses.dataclass(frozen=True)
class KeyScores:
    """How a key's score comes from its logits.

    Attributes:
      rows: query tokens that count.
      average_rows: one score per key; otherwise one per row and key.
      mode: "logit" averages logits, "weight" attention probabilities.
      per_kv_head: one score per KV head, over the query heads of its group.
      block: neighbouring keys whose scores are averaged.
    """

    rows: tuple[int, ...]
    average_rows: bool
    mode: str
    per_kv_head: bool
    block: int = 1

    @classmethod
    def of(
        cls, scores: str, tokens: int, mode: str, per_kv_head: bool, block: int = 1
    ) -> "KeyScores":
        """From the names that `verify_attention` takes, for T query tokens."""
        last = tokens - 1
        chosen = {"first+last": tuple(sorted({0, last})), "last": (last,)}
        rows = chosen.get(scores, tuple(range(tokens)))
        return cls(rows, scores != "each", mode, per_kv_head, block)

    def shape(self, batch: int, kv_heads: int, keys: int) -> tuple[int, ...]:
        """Shape of the scores: [batch, R unless averaged, K if per KV head, keys / block]."""
        rows = () if self.average_rows else (len(self.rows),)
        return (batch, *rows, *((kv_heads,) if self.per_kv_head else ()), keys // self.block)

    def noted_shape(self, batch: int, kv_heads: int, group: int, keys: int) -> tuple[int, ...]:
        """Shape of what `note` keeps of `keys` keys."""
        if self.mode == "logit":
            return self.shape(batch, kv_heads, keys)
        return (batch, kv_heads, len(self.rows), group, keys)

    def note(self, logits: Float[Array, "B K T G S"]) -> Array:
        """What to keep of a chunk's logits: their averages, or for "weight" the chosen rows."""
        chosen = self.choose_rows(logits)
        return self.average(chosen) if self.mode == "logit" else chosen

    def choose_rows(self, x: Float[Array, "B K T G S"]) -> Float[Array, "B K R G S"]:
        """The rows that count."""
        if len(self.rows) == x.shape[2]:
            return x
        return jnp.stack([x[:, :, row] for row in self.rows], axis=2)

    def average(self, x: Float[Array, "B K R G S"]) -> Float[Array, "B *rest S/block"]:
        """Mean over query heads, the keys of a block and, unless kept apart, rows."""
        heads = (3,) if self.per_kv_head else (1, 3)
        x = x.reshape(*x.shape[:-1], -1, self.block)
        mean = x.mean(axis=(2, *heads, 5) if self.average_rows else (*heads, 5))
        return mean if self.average_rows or not self.per_kv_head else mean.swapaxes(1, 2)

    def mask(
        self, scores: Float[Array, "B *rest S/block"], lengths: Int[Array, " B"]
    ) -> Float[Array, "B *rest S/block"]:
        """Clears the scores of blocks that some query does not see whole."""
        end = jnp.arange(1, scores.shape[-1] + 1, dtype=jnp.int32)[None, :] * self.block
        scored = end <= lengths[:, None] + 1
        scored = scored.reshape(-1, *(1,) * (scores.ndim - 2), scores.shape[-1])
        return jnp.where(scored, scores, 0.0)
