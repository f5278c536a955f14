"""Drafting with all keys: nothing is gained, and under greedy decoding every draft is accepted.

The upper bound of acceptance, and a test of everything around the draft.
"""

from jax.sharding import Mesh
from jaxtyping import Array, Int

from vegas_jax.cache import KVCache
from vegas_jax.config import SpecConfig
from vegas_jax.model.config import ModelConfig
from vegas_jax.model.transformer import Attend
from vegas_jax.sharded_ops import verify_attention


def score_rows(spec: SpecConfig) -> None:
    """No scores are needed."""


def init(spec: SpecConfig, config: ModelConfig, batch: int, rows: int) -> None:
    """Nothing is handed on."""


def select(
    spec: SpecConfig,
    scores: tuple,
    lengths: Array,
    accepted: Array,
    kernels: str,
    mesh: Mesh | None,
) -> None:
    """Nothing is chosen."""


def prepare(
    spec: SpecConfig, selection: None, cache: KVCache, kernels: str, mesh: Mesh | None
) -> None:
    """Nothing is shared."""


def attend(
    spec: SpecConfig,
    prepared: None,
    lengths: Int[Array, "B"],
    step: Array,
    kernels: str,
    mesh: Mesh | None,
) -> Attend:
    """Full attention over the cache."""

    def attend_layer(
        layer: int, q: Array, k: Array, v: Array, sinks: Array | None
    ) -> tuple[Array, None]:
        out, _, _ = verify_attention(
            q, k, v, lengths + step, sinks=sinks, kernels=kernels, mesh=mesh
        )
        return out, None

    return attend_layer
