"""From what a kernel writes of each key while it attends to the scores of the keys.

A kernel goes through a sequence's keys in tiles and does not know a row's log-sum-exp before the
end. It packs the rows that score first (`splits.token_order` of `KeyScores.rows`), and writes
either of the two forms below. What it leaves unwritten, past a sequence's keys, may hold anything.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.splits import LOG2_E
from pallas_kernels.verify.key_scores import KeyScores


def scores_from_logits(
    logits: Float[Array, "b K E S"], key_scores: KeyScores, lengths: Int[Array, " b"]
) -> Float[Array, "b *rest S/block"]:
    """Scores in mode "logit".

    Args:
      logits: scaled, averaged over each KV head's group; E is 1 where `average_rows`, for the mean
        over the rows too, else one for each row.
      key_scores: how keys are scored.
      lengths: keys before the query tokens, see `verify_attention`.
    """
    scores = logits.reshape(*logits.shape[:-1], -1, key_scores.block).mean(axis=-1)
    scores = scores.swapaxes(1, 2) if key_scores.per_kv_head else scores.mean(axis=1)
    if key_scores.average_rows:
        scores = scores[:, 0]
    return key_scores.mask(scores, lengths)


def scores_from_weights(
    weights: Float[Array, "b K R C"],
    peaks: Float[Array, "b K tiles R"],
    lse: Float[Array, "b T H"],
    key_scores: KeyScores,
    lengths: Int[Array, " b"],
    summed: int,
    cache_rows: int,
) -> Float[Array, "b *rest S/block"]:
    """Scores in mode "weight".

    Args:
      weights: for each packed row and each run of `summed` keys, the sum of exp2(logit - peak), the
        logits to base 2; of all rows or, at least, those that score, and of whole tiles of keys.
      peaks: the number that a row's weights in a tile are relative to, a logit to base 2.
      lse: log-sum-exp of each row's logits (and sink) to base e.
      key_scores: how keys are scored.
      lengths: keys before the query tokens, see `verify_attention`.
      summed: divides the block of `key_scores` and a tile's keys.
      cache_rows: S.
    """
    batch, kv_heads, tiles, _ = peaks.shape
    tokens = len(key_scores.rows)
    row_lse = jnp.stack([lse[:, t] for t in key_scores.rows], axis=1)  # [b, R, H]
    row_lse = row_lse.reshape(batch, tokens, kv_heads, -1).swapaxes(1, 2) * LOG2_E
    scored = tokens * row_lse.shape[3]
    peaks = peaks[..., :scored].swapaxes(2, 3).reshape(*row_lse.shape, tiles)
    factor = jnp.exp2(peaks - row_lse[..., None]) / summed
    weights = weights[:, :, :scored].astype(jnp.float32).reshape(*row_lse.shape, tiles, -1)
    means = (weights * factor[..., None]).reshape(*row_lse.shape, -1)
    coarse = dataclasses.replace(key_scores, block=key_scores.block // summed)
    return key_scores.mask(coarse.average(means[..., : cache_rows // summed]), lengths)
