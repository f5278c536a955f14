"""Ways of choosing the keys that a draft step attends to: one module each, behind one seam.

All self-speculative systems share a skeleton, `vegas_jax.spec`; they differ only in which keys a
draft step sees and when that choice is made.
"""

from typing import Any, Protocol

from jax.sharding import Mesh
from jaxtyping import Array, Int

from vegas_jax.cache import KVCache
from vegas_jax.config import SpecConfig
from vegas_jax.drafters import dense, streaming, vegas
from vegas_jax.drafters.selection import Selection
from vegas_jax.model.config import ModelConfig
from vegas_jax.model.transformer import Attend


class Drafter(Protocol):
    """What a drafter module provides. `kernels` and `mesh` are the model's."""

    def score_rows(self, spec: SpecConfig) -> str | None:
        """Which verified rows' key scores the verification must yield; None for no scores."""

    def init(
        self, spec: SpecConfig, config: ModelConfig, batch: int, rows: int
    ) -> Selection | None:
        """The state that a round hands to the next, for a cache of `rows` rows, empty."""

    def select(
        self,
        spec: SpecConfig,
        scores: tuple[Any, ...],
        lengths: Int[Array, "b"],
        accepted: Int[Array, "b"],
        kernels: str,
        mesh: Mesh | None,
    ) -> Selection | None:
        """Chooses keys for the next round from each layer's scores.

        `lengths` are the verified rows before the verification that gave the scores.
        """

    def prepare(
        self, spec: SpecConfig, selection: Any, cache: KVCache, kernels: str, mesh: Mesh | None
    ) -> Any:
        """What the draft steps of a round share: `attend` gets it at every step.

        `cache` holds the layers that attend to the whole context, and no others.
        """

    def attend(
        self,
        spec: SpecConfig,
        prepared: Any,
        lengths: Int[Array, "B"],
        step: Array,
        kernels: str,
        mesh: Mesh | None,
    ) -> Attend:
        """Attention of draft step `step`, 0 .. gamma-1, whose token stands at lengths + step."""


def get(spec: SpecConfig) -> Drafter:
    """The drafter of `spec.method`; `plain` makes no drafts and shares the dense one."""
    modules: dict[str, Drafter] = {"vegas": vegas, "streaming": streaming, "dense": dense}
    return modules["dense" if spec.method == "plain" else spec.method]


__all__ = ["Drafter", "Selection", "get"]
