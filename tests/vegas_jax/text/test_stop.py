"""Stop strings against the definition, written out."""

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vegas_jax.errors import InputError
from vegas_jax.text import StopChecker

PIECES = st.lists(st.text("ab\n", max_size=4), max_size=12)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=3)


class StopHit(NamedTuple):
    """Where a text stops: after `num_tokens` tokens, with `text` before the stop string."""

    num_tokens: int
    text: str


def find_stop(pieces, stops):
    checker, shown = StopChecker(stops), ""
    for num_tokens, piece in enumerate(pieces, start=1):
        shown += checker.add(piece)
        if checker.stopped:
            return StopHit(num_tokens, shown)
    return None


def by_definition(pieces, stops):
    """The first token after which a stop string occurs; of those, the earliest to begin."""
    for n in range(1, len(pieces) + 1):
        text = "".join(pieces[:n])
        starts = [text.index(stop) for stop in stops if stop in text]
        if starts:
            return StopHit(n, text[: min(starts)])
    return None


@given(pieces=PIECES, stops=STOPS)
def test_stops_follow_the_definition(pieces, stops):
    assert find_stop(pieces, stops) == by_definition(pieces, stops)


@given(pieces=PIECES, stops=STOPS)
def test_streaming_shows_what_is_safe_and_no_less(pieces, stops):
    checker, shown = StopChecker(stops), ""
    for n, piece in enumerate(pieces, start=1):
        shown += checker.add(piece)
        hit = by_definition(pieces[:n], stops)
        assert checker.stopped is (hit is not None)
        if hit:
            assert shown == hit.text
            assert checker.flush() == ""
            return
        text = "".join(pieces[:n])
        held = text.removeprefix(shown)
        assert shown + held == text
        ends = [text[i:] for i in range(len(text))]
        unsafe = [end for end in ends if any(stop.startswith(end) for stop in stops)]
        assert held == (unsafe[0] if unsafe else "")
    assert shown + checker.flush() == "".join(pieces)


@pytest.mark.parametrize(
    ("pieces", "stops", "hit"),
    [
        (["ab", "cd"], ["x"], None),
        ([], ["x"], None),
        (["ab"], [], None),
        (["a", "x", "b"], ["x"], StopHit(2, "a")),
        (["a\n", "", "\nb", "c"], ["\n\n"], StopHit(3, "a")),  # over several tokens
        (["stop"], ["stop"], StopHit(1, "")),
        (["aaab"], ["aab"], StopHit(1, "a")),  # overlaps itself
        (["a", "", "🙂!"], ["🙂"], StopHit(3, "a")),  # a character that was held back
        (["1 END STOP"], ["STOP", "END"], StopHit(1, "1 ")),  # the earliest wins
        (["a", "b", "c"], ["abc", "ab"], StopHit(2, "")),  # same place: the shorter is complete
        (["ab", "cd", "ef"], ["abcdef", "cd"], StopHit(2, "ab")),  # complete before the longer
        (["abcdef"], ["abcdef", "cd"], StopHit(1, "")),  # complete with the same token
    ],
)
def test_examples(pieces, stops, hit):
    assert find_stop(pieces, stops) == hit


def test_nothing_is_added_after_the_stop():
    checker = StopChecker(["x"])
    assert checker.add("axb") == "a"
    with pytest.raises(InputError, match="before a stop string"):
        checker.add("c")


@pytest.mark.parametrize("stops", [[""], ["a", ""], "ab"])
def test_stops_are_non_empty_strings(stops):
    with pytest.raises(InputError, match="stops"):
        StopChecker(stops)
