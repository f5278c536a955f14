"""The public `verify_attention`."""

from jaxtyping import Array, Float, Int

from pallas_kernels.checks import (
    as_int32,
    as_scale,
    check_sinks,
    require,
    require_attention_arguments,
    require_choice,
    require_int,
    require_shape,
)
from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.verify import cudnn, mosaic_sm90, reference, triton, xla
from pallas_kernels.verify.key_scores import SCORE_MODES, SCORES, KeyScores

IMPLEMENTATIONS = {
    "cudnn": Implementation(cudnn.verify_attention, cudnn.refuses),
    "mosaic_gpu": Implementation(mosaic_sm90.verify_attention, mosaic_sm90.refuses),
    "interpret": Implementation(mosaic_sm90.emulate, mosaic_sm90.refuses),
    "triton": Implementation(triton.verify_attention, triton.refuses),
    "xla": Implementation(xla.verify_attention),
    "reference": Implementation(reference.verify_attention),
}


def verify_attention(
    q: Float[Array, "b T H D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    lengths: Int[Array, " b"],
    *,
    slots: Int[Array, " b"] | None = None,
    scores: str | None = None,
    score_mode: str = "weight",
    per_kv_head: bool = False,
    score_block: int = 1,
    window: int | None = None,
    sinks: Float[Array, " H"] | None = None,
    scale: float | None = None,
    kernels: str = "auto",
) -> tuple[
    Float[Array, "b T H D"], Float[Array, "b T H"], Float[Array, "b *rest S/score_block"] | None
]:
    """Causal grouped-query attention of T new tokens over the cache, which can score the keys.

    The new tokens' keys and values already stand in the cache, at rows lengths .. lengths+T-1:
    query t sees the cache rows below lengths+t+1. Nothing depends on the rows from lengths+T on,
    whatever they hold. Assumed but unchecked: 0 <= lengths <= S-T and 0 <= slots < B.

    The score of a key is the mean, over the chosen query tokens and the query heads, of its logit
    (the paper's formula) or of its attention weight exp(logit - lse) under each row's own lse.
    Choosing the first and last token is Collect-2-Query. Source: Vegas, arXiv 2602.07223.

    Args:
      q: queries.
      k: cached keys, of the same dtype as q.
      v: cached values, likewise.
      lengths: for each query batch row, how many keys come before its tokens.
      slots: the cache's batch row that each query batch row attends to; None is its own (b = B).
      scores: query tokens that score the keys: "first+last", "last", "all"; "each" keeps their
        scores apart; None computes no scores.
      score_mode: "weight" or "logit" (scaled, before the softmax).
      per_kv_head: score for each KV head, over the query heads of its group alone.
      score_block: keys are scored in aligned blocks of so many, by the mean of their scores;
        divides S.
      window: a query sees only the last `window` keys, its own included; not with `scores`.
      sinks: a logit per query head that enters the softmax and has no value (gpt-oss model card).
      scale: factor on q.k; None is D**-0.5.
      kernels: which implementation runs, see `pallas_kernels.dispatch`.

    Returns:
      out: in q's dtype.
      lse: log-sum-exp of each row's scaled logits (and sink), float32; partial results over
        different keys combine by it, as in Flash-Decoding.
      key_scores: float32 [b, S/score_block], or [b, K, S/score_block] if per_kv_head; for "each"
        with a T axis after b; None without `scores`. They are of the whole blocks below
        lengths+1, which every query sees, and 0 elsewhere.

    Raises:
      ValueError: an argument has a wrong shape, type or name.
    """
    require_attention_arguments(q, k, v)
    batch, tokens, _, head_dim = q.shape
    if slots is None:
        require_shape("q", q, (k.shape[0], *q.shape[1:]))
    else:
        slots = as_int32("slots", slots, (batch,))
    lengths = as_int32("lengths", lengths, (batch,))
    require_choice("scores", scores, (None, *SCORES))
    require_choice("score_mode", score_mode, SCORE_MODES)
    key_scores = None
    require_int("score_block", score_block, 1)
    if scores is not None:
        require(window is None, "scores", "cannot be had with a `window`")
        require(
            k.shape[2] % score_block == 0,
            "score_block",
            f"must divide the {k.shape[2]} cache rows, but is {score_block}",
        )
        key_scores = KeyScores.of(scores, tokens, score_mode, per_kv_head, score_block)
    if window is not None:
        require_int("window", window, 1)
    sinks = check_sinks(sinks, q)
    scale = as_scale(scale, head_dim)
    arguments = (q, k, v, lengths, slots, key_scores, scale, window, sinks)
    return choose(kernels, IMPLEMENTATIONS, *arguments)(*arguments)
