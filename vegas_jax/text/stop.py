"""Stop strings: the text ends before the first that occurs, the tokens with the one that ends it.

The rule depends only on the tokens, never on how many came at once: generation stops with the first
token after which some stop string occurs in the text; of those that occur by then, the one that
begins earliest is cut, with all that follows it.
"""

from collections.abc import Sequence

from vegas_jax.errors import check


class StopChecker:
    """Finds stop strings in a growing text, and says which part of it is safe to show.

    Attributes:
      stopped: whether a stop string has occurred; nothing may be added any more.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        check(all(stops) and not isinstance(stops, str), "stops", stops, "non-empty strings")
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""  # the end of the text so far that could begin a stop string
        self.stopped = False

    def add(self, piece: str) -> str:
        """Takes the text of the next token; returns what is now known to precede any stop string.

        Raises:
          InputError: the text has stopped already.
        """
        check(not self.stopped, "piece", piece, "added before a stop string has occurred")
        text = self._held + piece
        starts = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        self.stopped = bool(starts)
        safe = min(starts) if starts else len(text) - self._num_held(text)
        self._held = "" if starts else text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """Returns the text held back, when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
