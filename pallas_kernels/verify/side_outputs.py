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

from pallas_kernels.splits import LOG2_E
from pallas_kernels.verify.key_scores import KeyScores


def scores_from_log_sums(
    log_sums: Float[Array, "b K R S/summed"],
    lse: Float[Array, "b T H"],
    key_scores: KeyScores,
    lengths: Int[Array, " b"],
    summed: int,
) -> Float[Array, "b *rest S/block"]:
    """Scores in mode "weight" from log-sum-exps of runs of keys.

    Args:
      log_sums: log-sum-exp to base 2 of the logits of each run of `summed` keys (of one key, its
        logit), for the packed rows that score and perhaps others after them.
      lse: log-sum-exp to base e of each row's logits (and sink).
      key_scores: how keys are scored.
      lengths: keys before the query tokens, see `verify_attention`.
      summed: keys of a run.
    """
    row_lse = scoring_rows(lse, key_scores, log_sums.shape[1]) * LOG2_E
    scored = row_lse.shape[2] * row_lse.shape[3]
    log_sums = log_sums[:, :, :scored].reshape(*row_lse.shape, -1)
    weights = jnp.exp2(log_sums - row_lse[..., None]) / summed
    return scores_from_weights(weights, key_scores, lengths, summed)


def scoring_rows(
    x: Float[Array, "b T H"], key_scores: KeyScores, kv_heads: int
) -> Float[Array, "b K R G"]:
    """A number of each query token and head, for those tokens that score."""
    chosen = jnp.stack([x[:, t] for t in key_scores.rows], axis=1)
    return chosen.reshape(*chosen.shape[:2], kv_heads, -1).swapaxes(1, 2)


def scores_from_weights(
    weights: Float[Array, "b K R G S/summed"],
    key_scores: KeyScores,
    lengths: Int[Array, " b"],
    summed: int,
) -> Float[Array, "b *rest S/block"]:
    """Scores in mode "weight" from the mean attention weight of each run of `summed` keys."""
    mean = weights.mean(axis=3)
    if key_scores.average_rows:
        mean = mean.mean(axis=2, keepdims=True)
    return scores_from_means(mean, key_scores, lengths, summed)


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
