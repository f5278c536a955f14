"""Which implementation of an op runs."""

from collections.abc import Mapping
from typing import TypeVar

from pallas_kernels.checks import require_choice

Implementation = TypeVar("Implementation")


def choose(kernels: str, implementations: Mapping[str, Implementation]) -> Implementation:
    """Looks up an op's implementation.

    Args:
      kernels: the name of an implementation, or "auto" for the fastest one that runs here.
      implementations: the op's implementations by name, the fastest first.

    Raises:
      ValueError: there is no implementation of that name.
    """
    require_choice("kernels", kernels, ("auto", *implementations))
    name = next(iter(implementations)) if kernels == "auto" else kernels
    return implementations[name]
