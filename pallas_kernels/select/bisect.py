"""Finding the threshold that exactly k entries of a row pass, by counting.

First a score is searched for, among the float32 numbers in their order. Ties may leave it passed by
more than k entries; then an order of the entries is searched, in which those above the score stand
before those at it, and these by position. Each step counts at one threshold, which halves what is
left to search, or at three, which quarter it.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

ABOVE_ALL = 0x7F800001  # the ordinal (see `number`) that follows infinity's: a NaN
LOWEST, ZERO, ONE = -0x7F800000, 0, 0x3F800000  # ordinals; the lowest finite number is `LOWEST`

Scalar = Int[Array, ""]
State = tuple[Scalar, Scalar, Scalar, Scalar]


def bisect_scores(
    counts_from: Callable[[Sequence[Float[Array, ""]], Scalar], Sequence[Scalar]],
    k: Scalar,
    thresholds: int,
) -> tuple[Float[Array, ""], Scalar, Scalar, Scalar]:
    """Finds the k-th highest score, or a lower number that exactly k scores reach.

    Args:
      counts_from: given numbers and how many calls there were before, how many scores reach each.
      k: at least 0.
      thresholds: how many numbers a call is given: 1 or 3.

    Returns:
      The score, NaN for k = 0; k, lowered to the number of scores above -inf; how many scores reach
      the score; the number of calls.
    """

    def counts_at(ordinals: Sequence[Scalar], step: Scalar) -> Sequence[Scalar]:
        return counts_from([number(x) for x in ordinals], step)

    ordinals = [jnp.int32(x) for x in (LOWEST, ZERO, ONE)[:thresholds]]
    counts = counts_at(ordinals, jnp.int32(0))
    k = jnp.minimum(k, counts[0])
    state = ordinals[0], jnp.int32(ABOVE_ALL), counts[0], jnp.int32(0)
    low, high, reached, step = _narrow(state, ordinals, counts, k)
    nothing = k == 0
    low = jnp.where(nothing, ABOVE_ALL, low)
    reached = jnp.where(nothing, 0, reached)
    low, reached, step = _search(counts_at, (low, high, reached, step), k, thresholds)
    return number(low), k, reached, step


def bisect_order(
    counts_before: Callable[[Sequence[Scalar], Scalar], Sequence[Scalar]],
    end: int,
    k: Scalar,
    reached: Scalar,
    step: Scalar,
    thresholds: int,
) -> tuple[Scalar, Scalar]:
    """Finds an end in an order before which there are exactly k entries.

    Args:
      counts_before: given ends and how many calls there were before, how many entries are before
        each; fewer than k before 1.
      end: an end before which there are enough.
      k: how many to take.
      reached: how many there are before `end`, at least k.
      step: how many calls of `bisect_scores` there were.
      thresholds: how many ends a call is given: 1 or 3.

    Returns:
      The end; the number of calls by now.
    """

    def counts_at(ordinals: Sequence[Scalar], step: Scalar) -> Sequence[Scalar]:
        return counts_before([-x for x in ordinals], step)

    state = jnp.int32(-end), jnp.int32(-1), reached, step
    found, _, step = _search(counts_at, state, k, thresholds)
    return -found, step


def _search(
    counts_at: Callable[[Sequence[Scalar], Scalar], Sequence[Scalar]],
    state: State,
    k: Scalar,
    thresholds: int,
) -> tuple[Scalar, Scalar, Scalar]:
    """Finds the highest ordinal that k entries or more reach, or a lower one that exactly k do.

    Args:
      counts_at: given ascending ordinals and how many calls there were before, how many reach each.
      state: low, an ordinal that k entries or more reach; high, one that fewer do; how many reach
        low; how many calls there were before.
      k: see above.
      thresholds: how many ordinals a call is given.

    Returns:
      The ordinal; how many reach it; the number of calls by now.
    """

    def step(state: State) -> State:
        low, high, _, calls = state
        middle = midpoint(low, high)
        ordinals = [middle]
        if thresholds == 3:
            ordinals = [midpoint(low, middle), middle, midpoint(middle, high)]
        return _narrow(state, ordinals, counts_at(ordinals, calls), k)

    def unsettled(state: State) -> Bool[Array, ""]:
        low, high, reached, _ = state
        return (reached > k) & (low + 1 < high)

    low, _, reached, calls = lax.while_loop(unsettled, step, state)
    return low, reached, calls


def _narrow(state: State, ordinals: Sequence[Scalar], counts: Sequence[Scalar], k: Scalar) -> State:
    """The state after a call, see `_search`."""
    low, high, reached, calls = state
    for ordinal, count in zip(ordinals, counts, strict=True):
        low = jnp.where(count >= k, ordinal, low)
        reached = jnp.where(count >= k, count, reached)
    for ordinal, count in zip(reversed(ordinals), reversed(counts), strict=True):
        high = jnp.where(count >= k, high, ordinal)
    return low, high, reached, calls + 1


def midpoint(low: Scalar, high: Scalar) -> Scalar:
    """floor((low + high) / 2) without overflow."""
    return (low & high) + ((low ^ high) >> 1)


def number(ordinal: Scalar) -> Float[Array, ""]:
    """The float32 that is `ordinal` steps above 0.0; -0.0 is one step below it."""
    return lax.bitcast_convert_type(ordinal ^ ((ordinal >> 31) & 0x7FFFFFFF), jnp.float32)
