"""Which drafts stand: speculative sampling, and exact agreement.

Both leave the emitted tokens distributed as plain sampling's (arXiv 2211.17192, appendix A.1);
agreement under coupled noise even makes them the same tokens.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from vegas_jax.sampling import ACCEPT, RESIDUAL, draw, noise_key


def accept_equal(
    drafts: Int[Array, "B gamma"], targets: Int[Array, "B gamma+1"]
) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
    """Keeps drafts up to the first that differs from the target's own draw.

    Returns how many are kept, and the target's token after them. Right for greedy decoding, and for
    sampling when draft and target draw with the same noise.
    """
    gamma = drafts.shape[1]
    agree = (drafts == targets[:, :gamma]).astype(jnp.int32)
    accepted = jnp.cumprod(agree, axis=1).sum(1, dtype=jnp.int32)
    following = jnp.take_along_axis(targets, accepted[:, None], axis=1)[:, 0]
    return accepted, following


def accept_rejection(
    drafts: Int[Array, "B gamma"],
    q: Float[Array, "B gamma V"],
    p: Float[Array, "B gamma+1 V"],
    seeds: UInt32[Array, "B 2"],
    rounds: Int[Array, "B"],
) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
    """Speculative sampling (arXiv 2211.17192, algorithm 1; Vegas section 3.1).

    Keeps draft i with probability min(1, p_i / q_i) of it, up to the first refusal; then draws from
    max(p - q, 0) renormalised, or from the last row's p when every draft was kept.

    Args:
      drafts: drawn from `q`.
      q: the drafts' distributions, exactly as they were drawn from.
      p: the target's, under the same processors.
      seeds: of the requests.
      rounds: the requests' round numbers, which make the noise of each round fresh.

    Returns how many drafts are kept, and the token after them.
    """
    gamma = drafts.shape[1]
    p_draft = jnp.take_along_axis(p[:, :gamma], drafts[:, :, None], axis=2)[:, :, 0]
    q_draft = jnp.take_along_axis(q, drafts[:, :, None], axis=2)[:, :, 0]

    def uniforms(seed: Array, index: Array) -> Array:
        return jax.random.uniform(noise_key(seed, ACCEPT, index), (gamma,))

    # u < p/q, written without the division: q is never 0 for a token drawn from it.
    kept = jax.vmap(uniforms)(seeds, rounds) * q_draft < p_draft
    accepted = jnp.cumprod(kept.astype(jnp.int32), axis=1).sum(1, dtype=jnp.int32)

    # After the last draft q counts as 0, and the residual is p itself.
    q = jnp.concatenate([q, jnp.zeros_like(q[:, :1])], axis=1)
    p_here = jnp.take_along_axis(p, accepted[:, None, None], axis=1)[:, 0]
    q_here = jnp.take_along_axis(q, accepted[:, None, None], axis=1)[:, 0]
    residual = jnp.maximum(p_here - q_here, 0.0)
    # p == q everywhere leaves no residual; a refusal there is a rounding error of the ratio.
    residual = jnp.where(residual.sum(-1, keepdims=True) > 0, residual, p_here)
    keys = jax.vmap(lambda seed, index: noise_key(seed, RESIDUAL, index))(seeds, rounds)
    return accepted, draw(residual, keys)
