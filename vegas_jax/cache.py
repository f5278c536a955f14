"""The KV cache: an explicit pytree that the caller owns, passes in and gets back."""

import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from vegas_jax.model.config import ModelConfig
from vegas_jax.sharding import check_batch, constrain_cache

LayerCache = tuple[Float[Array, "B K S D"], Float[Array, "B K S D"]]


class KVCache(struct.PyTreeNode):
    """Keys and values of every layer, and how many of their rows are verified.

    A tuple of per-layer arrays rather than one stacked array: inside a loop each is updated in
    place, where a scan over a stacked cache would copy every layer out and back.

    Attributes:
      layers: per layer (k, v), each [B, K, S, D]. Rows at or beyond `lengths` hold leftovers that
        nothing may depend on; a rollback only shortens `lengths`.
      lengths: [B], the verified rows of each sequence.
    """

    layers: tuple[LayerCache, ...]
    lengths: Int[Array, "B"]

    @property
    def rows(self) -> int:
        """S, the rows that each sequence has."""
        return self.layers[0][0].shape[2]


def init_cache(
    config: ModelConfig, batch: int, rows: int, dtype: jnp.dtype, mesh: Mesh | None = None
) -> KVCache:
    """An empty cache for `batch` sequences of up to `rows` tokens.

    Raises:
      InputError: the mesh's data axis does not divide `batch`.
    """
    check_batch(batch, mesh)
    shape = (batch, config.num_kv_heads, rows, config.head_dim)
    layers = tuple(
        (jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers)
    )
    return constrain_cache(KVCache(layers, jnp.zeros(batch, jnp.int32)), mesh)


def write(
    layer: LayerCache,
    k: Float[Array, "b T K D"],
    v: Float[Array, "b T K D"],
    positions: Int[Array, "b T"],
    slots: Int[Array, "b"],
) -> LayerCache:
    """Puts the keys and values of new tokens at their positions; in place when donated.

    Batch row i goes to cache row slots[i]. Positions beyond the cache are dropped.
    """
    where = (slots[:, None], slice(None), positions)
    k_cache, v_cache = layer
    return (
        k_cache.at[where].set(k, mode="drop", unique_indices=True),
        v_cache.at[where].set(v, mode="drop", unique_indices=True),
    )
