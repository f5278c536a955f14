"""From what a kernel writes of each key while it attends to the scores of the keys.

A kernel goes through a sequence's keys once and does not know a row's log-sum-exp before the end.
It packs the rows that score first (`splits.token_order` of `KeyScores.rows`) and writes one of the
forms below, perhaps for runs of `summed` keys, which divide the block of `KeyScores`. What it
leaves unwritten, past a sequence's keys, may hold anything.

Means go over one axis at a time: XLA makes one elementwise pass of them, whereas for a mean over
several axes it writes everything transposed first.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.verify.key_scores import KeyScores


def scores_from_log_sums(
    log_sums: Float[Array, "b K R*G S/summed"],
    lse: Float[Array, "b K rows"],
    key_scores: KeyScores,
    lengths: Int[Array, " b"],
    summed: int,
) -> Float[Array, "b *rest S/block"]:
    """Scores in mode "weight" from log-sum-exps of runs of keys.

    Args:
      log_sums: log-sum-exp of the logits of each run of `summed` keys (of one key, its logit), for
        the packed rows that score; to base 2, as the next.
      lse: log-sum-exp of each packed row's logits (and sink).
      key_scores: how keys are scored.
      lengths: keys before the query tokens, see `verify_attention`.
      summed: keys of a run.
    """
    weights = jnp.exp2(log_sums - lse[:, :, : log_sums.shape[2], None])
    return scores_from_weights(weights / summed, key_scores, lengths, summed)


def scores_from_weights(
    weights: Float[Array, "b K R*G S/summed"],
    key_scores: KeyScores,
    lengths: Int[Array, " b"],
    summed: int,
) -> Float[Array, "b *rest S/block"]:
    """Scores in mode "weight" from the mean attention weight of each run of `summed` keys."""
    batch, kv_heads, _, runs = weights.shape
    entries = 1 if key_scores.average_rows else len(key_scores.rows)
    means = weights.reshape(batch, kv_heads, entries, -1, runs).mean(axis=3)
    return scores_from_means(means, key_scores, lengths, summed)


def scores_from_means(
    means: Float[Array, "b K E S/summed"],
    key_scores: KeyScores,
    lengths: Int[Array, " b"],
    summed: int = 1,
) -> Float[Array, "b *rest S/block"]:
    """Scores from the mean logits or weights of each KV head's group.

    E is 1 where `average_rows`, for the mean over the rows that score too, else one for each row.
    """
    scores = means.swapaxes(1, 2) if key_scores.per_kv_head else means.mean(axis=1)
    if key_scores.average_rows:
        scores = scores[:, 0]
    runs = key_scores.block // summed
    scores = scores.reshape(*scores.shape[:-1], -1, runs).mean(axis=-1)
    return key_scores.mask(scores, lengths)
