"""The public `select_top_k`."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.checks import as_int32, require, require_array, require_int
from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.select import reference, triton, xla


def _mosaic_gpu() -> Implementation:
    """Imported where it can run: older versions of JAX lack what the module names."""

    def run(*arguments: Any) -> Any:
        from pallas_kernels.select import mosaic_sm90

        return mosaic_sm90.select_top_k(*arguments)

    def refuses(*arguments: Any) -> str | None:
        from pallas_kernels.select import mosaic_sm90

        return mosaic_sm90.refuses(*arguments)

    return Implementation(run, refuses)


IMPLEMENTATIONS = {
    "mosaic_gpu": _mosaic_gpu(),
    "triton": Implementation(triton.select_top_k, triton.refuses),
    "xla": Implementation(xla.select_top_k),
    "reference": Implementation(reference.select_top_k),
}


def select_top_k(
    scores: Float[Array, "*rest M"],
    k: Int[Array, "*rest"],
    *,
    max_k: int,
    kernels: str = "auto",
) -> tuple[Int[Array, "*rest max_k"], Int[Array, "*rest"]]:
    """The exact set of the k highest scores of each row, in ascending order of position.

    Of equal scores the lower positions win; -0.0 and subnormal numbers equal 0.0. Entries of -inf
    or NaN are never taken. Source: the selection step of Vegas, arXiv 2602.07223; unlike in the
    authors' release, ties are broken the same way each time.

    Args:
      scores: what to rank.
      k: how many to take; negative counts as 0.
      max_k: static bound: no more are taken.
      kernels: which implementation runs, see `pallas_kernels.dispatch`.

    Returns:
      int32 positions, 0 from the count on; int32 counts: min(k, max_k, entries above -inf).

    Raises:
      ValueError: an argument has a wrong shape, type or range.
    """
    require_array("scores", scores)
    require(
        scores.ndim >= 1 and scores.dtype in (jnp.float32, jnp.bfloat16, jnp.float16),
        "scores",
        f"must be floats of 16 or 32 bits, but is {scores.dtype}{list(scores.shape)}",
    )
    k = as_int32("k", k, scores.shape[:-1])
    require_int("max_k", max_k, 1)
    arguments = (scores.astype(jnp.float32), k, max_k)
    return choose(kernels, IMPLEMENTATIONS, *arguments)(*arguments)
