"""From what a kernel writes of each key while it attends to the scores of the keys.

A kernel goes through a sequence's keys once and does not know a row's log-sum-exp before the end.
It packs the rows that score first (`splits.token_order` of `KeyScores.rows`) and writes one of the
forms below. What it leaves unwritten, past a sequence's keys, may hold anything.
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
      logits: of each key, scaled, averaged over each KV head's group; E is 1 where `average_rows`,
        for the mean over the rows that score too, else one for each of them.
      key_scores: how keys are scored.
      lengths: keys before the query tokens, see `verify_attention`.
    """
    scores = logits.reshape(*logits.shape[:-1], -1, key_scores.block).mean(axis=-1)
    scores = scores.swapaxes(1, 2) if key_scores.per_kv_head else scores.mean(axis=1)
    if key_scores.average_rows:
        scores = scores[:, 0]
    return key_scores.mask(scores, lengths)


def scores_from_log_sums(
    log_sums: Float[Array, "b K R S/summed"],
    lse: Float[Array, "b T H"],
    key_scores: KeyScores,
    lengths: Int[Array, " b"],
    summed: int,
) -> Float[Array, "b *rest S/block"]:
    """Scores in mode "weight".

    Args:
      log_sums: log-sum-exp to base 2 of the logits of each run of `summed` keys, for the packed
        rows that score and perhaps others after them.
      lse: log-sum-exp to base e of each row's logits (and sink).
      key_scores: how keys are scored.
      lengths: keys before the query tokens, see `verify_attention`.
      summed: divides the block of `key_scores`; 1 for the logits themselves.
    """
    row_lse = scoring_rows(lse, key_scores, log_sums.shape[1]) * LOG2_E
    scored = row_lse.shape[2] * row_lse.shape[3]
    log_sums = log_sums[:, :, :scored].reshape(*row_lse.shape, -1)
    means = jnp.exp2(log_sums - row_lse[..., None]) / summed
    coarse = dataclasses.replace(key_scores, block=key_scores.block // summed)
    return key_scores.mask(coarse.average(means), lengths)


def scoring_rows(
    x: Float[Array, "b T H"], key_scores: KeyScores, kv_heads: int
) -> Float[Array, "b K R G"]:
    """A number of each query token and head, for those tokens that score."""
    chosen = jnp.stack([x[:, t] for t in key_scores.rows], axis=1)
    return chosen.reshape(*chosen.shape[:2], kv_heads, -1).swapaxes(1, 2)
