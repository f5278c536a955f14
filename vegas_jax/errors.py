"""Errors that a person can act on.

Each message is one sentence: which argument, its value, what is allowed.
"""

from typing import Any


class InputError(ValueError):
    """An argument or a file that cannot be used; command lines end with exit code 2."""


class CheckpointError(InputError):
    """A checkpoint folder that is missing, incomplete, truncated or of an unknown kind."""


class NonFiniteLogitsError(ArithmeticError):
    """The model produced a NaN or an infinity; every later token would be noise."""


def check(condition: bool, argument: str, value: Any, allowed: str) -> None:
    """Raises InputError "argument is value, but must be allowed" unless `condition` holds."""
    if not condition:
        raise InputError(f"{argument} is {shorten(repr(value), 80)}, but must be {allowed}")


def shorten(text: str, most: int) -> str:
    """The text, cut so that it fits into a sentence: at most so many characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."
