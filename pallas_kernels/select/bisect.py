"""Finding the threshold that exactly k entries of a row pass, by counting.

First a score is bisected, over the float32 numbers in their order. Ties may leave it passed by more
than k entries; then an order of the entries is bisected, in which those above the score stand
before those at it, and these by position.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

ABOVE_ALL = 0x7F800001  # the ordinal (see `number`) that follows infinity's: a NaN
LOWEST = -0x7F800000  # the ordinal of the lowest finite number

State = tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""], Int[Array, ""]]


def bisect_scores(
    count_from: Callable[[Float[Array, ""], Int[Array, ""]], Int[Array, ""]], k: Int[Array, ""]
) -> tuple[Float[Array, ""], Int[Array, ""], Int[Array, ""], Int[Array, ""]]:
    """Finds the k-th highest score, or a lower number that exactly k scores reach.

    Args:
      count_from: given a number and how many calls there were before, how many scores reach it.
      k: at least 0.

    Returns:
      The score, NaN for k = 0; k, lowered to the number of scores above -inf; how many scores reach
      the score; the number of calls.
    """
    low = jnp.int32(LOWEST)
    candidates = count_from(number(low), jnp.int32(0))
    k = jnp.minimum(k, candidates)
    nothing = k == 0
    low = jnp.where(nothing, ABOVE_ALL, low)
    reached = jnp.where(nothing, 0, candidates)

    def bisect(state: State) -> State:  # k scores or more reach `low`, fewer reach `high`
        low, high, reached, step = state
        middle = midpoint(low, high)
        reached_middle = count_from(number(middle), step)
        enough = reached_middle >= k
        low, high = jnp.where(enough, middle, low), jnp.where(enough, high, middle)
        return low, high, jnp.where(enough, reached_middle, reached), step + 1

    def unsettled(state: State) -> Bool[Array, ""]:
        low, high, reached, _ = state
        return (reached > k) & (low + 1 < high)

    state = low, jnp.int32(ABOVE_ALL), reached, jnp.int32(1)
    low, _, reached, step = lax.while_loop(unsettled, bisect, state)
    return number(low), k, reached, step


def bisect_order(
    count_before: Callable[[Int[Array, ""], Int[Array, ""]], Int[Array, ""]],
    end: int,
    k: Int[Array, ""],
    reached: Int[Array, ""],
    step: Int[Array, ""],
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Finds an end in an order before which there are exactly k entries.

    Args:
      count_before: given an end and how many calls there were before, how many entries are before
        it; fewer than k before 1.
      end: an end before which there are enough.
      k: how many to take.
      reached: how many there are before `end`, at least k.
      step: how many calls of `bisect_scores` there were.

    Returns:
      The end; the number of calls by now.
    """

    def bisect(state: State) -> State:  # k entries or more are before `high`, fewer before `low`
        low, high, reached, step = state
        middle = midpoint(low, high)
        before_middle = count_before(middle, step)
        enough = before_middle >= k
        low, high = jnp.where(enough, low, middle), jnp.where(enough, middle, high)
        return low, high, jnp.where(enough, before_middle, reached), step + 1

    def unsettled(state: State) -> Bool[Array, ""]:
        _, _, reached, _ = state
        return reached > k

    state = jnp.int32(1), jnp.int32(end), reached, step
    _, found, _, step = lax.while_loop(unsettled, bisect, state)
    return found, step


def midpoint(low: Int[Array, ""], high: Int[Array, ""]) -> Int[Array, ""]:
    """floor((low + high) / 2) without overflow."""
    return (low & high) + ((low ^ high) >> 1)


def number(ordinal: Int[Array, ""]) -> Float[Array, ""]:
    """The float32 that is `ordinal` steps above 0.0; -0.0 is one step below it."""
    return lax.bitcast_convert_type(ordinal ^ ((ordinal >> 31) & 0x7FFFFFFF), jnp.float32)
