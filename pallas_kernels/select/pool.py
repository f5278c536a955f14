"""Smoothing key scores over positions, then averaging them over blocks."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.checks import as_int32, require


def pool_scores(
    scores: Float[Array, "*rest S"],
    ranked_length: Int[Array, "*#rest"],
    *,
    pool: tuple[int, int],
    block_size: int,
) -> Float[Array, "*rest ceil(S/block_size)"]:
    """Block scores from the scores of positions (or of runs of them: read "run" for "position").

    Position i gets the mean score of positions i-ahead .. i+back: a key is worth reading if what
    stands up to `ahead` before it was read, since the next tokens look just ahead of where the
    verified ones looked. A window averages only the positions it has in [0, ranked_length). A
    block's score is the mean over its positions. `pool=(0, 0)` and `block_size=1` rank single
    positions by their own score, as published (Vegas, arXiv 2602.07223).

    Assumed but unchecked: ranked_length is a multiple of block_size, from 0 to S.

    Args:
      scores: one per position.
      ranked_length: positions that are ranked; its shape broadcasts to the scores' leading axes.
      pool: (back, ahead), the window's reach in positions.
      block_size: positions in a block.

    Returns:
      float32 scores, -inf for blocks from ranked_length / block_size on.

    Raises:
      ValueError: an argument has a wrong type or range.
    """
    require(
        scores.ndim >= 1 and jnp.issubdtype(scores.dtype, jnp.floating),
        "scores",
        f"must be floats with an axis of cache rows, but is {scores.dtype}{list(scores.shape)}",
    )
    ranked_length = as_int32("ranked_length", ranked_length)
    require(
        len(pool) == 2 and min(pool) >= 0,
        "pool",
        f"must be two non-negative integers (back, ahead), but is {pool}",
    )
    require(block_size >= 1, "block_size", f"must be at least 1, but is {block_size}")
    size = scores.shape[-1]
    ranked_length = jnp.broadcast_to(ranked_length, scores.shape[:-1])[..., None]
    position = jnp.arange(size, dtype=jnp.int32).reshape(*(1,) * (scores.ndim - 1), size)
    ranked = position < ranked_length
    scores = jnp.where(ranked, scores.astype(jnp.float32), 0.0)

    back, ahead = pool
    if (back, ahead) != (0, 0):
        first = jnp.maximum(position - ahead, 0)
        last = jnp.minimum(position + back, ranked_length - 1)
        held = jnp.maximum(last - first + 1, 1).astype(jnp.float32)
        scores = jnp.where(ranked, _window_sums(scores, ahead, back) / held, 0.0)

    num_blocks = -(-size // block_size)
    scores = _pad_last(scores, 0, num_blocks * block_size - size)
    means = scores.reshape(*scores.shape[:-1], num_blocks, block_size).mean(axis=-1)
    block = jnp.arange(num_blocks, dtype=jnp.int32).reshape(*(1,) * (scores.ndim - 1), num_blocks)
    return jnp.where(block < ranked_length // block_size, means, -jnp.inf)


def _window_sums(x: Float[Array, "*rest S"], before: int, after: int) -> Float[Array, "*rest S"]:
    """Sum of x[i-before .. i+after], 0 outside.

    Sums over 1, 2, 4, ... positions are doubled and put together by the width's binary digits: only
    the window's own values are added, so that nothing cancels as between prefix sums.
    """
    size, width = x.shape[-1], before + 1 + after
    power = _pad_last(x, before, after)  # sums of `span` positions from each position on
    total, covered, span = jnp.zeros_like(x), 0, 1
    while True:
        if width & span:
            total = total + lax.slice_in_dim(power, covered, covered + size, axis=-1)
            covered += span
        if 2 * span > width:
            return total
        ahead = lax.slice_in_dim(power, span, power.shape[-1], axis=-1)
        power = lax.slice_in_dim(power, 0, power.shape[-1] - span, axis=-1) + ahead
        span *= 2


def _pad_last(x: Array, low: int, high: int) -> Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(low, high)])
