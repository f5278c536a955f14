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
        shown = repr(value)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        raise InputError(f"{argument} is {shown}, but must be {allowed}")
