"""The jitted entry points, shared by every Generator of a process.

Model, SpecConfig and Processors are static; everything else is traced, so neither prompts nor
lengths nor sampling values recompile. The state (or cache) is donated: it is updated in place, and
the one handed in is gone afterwards.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from vegas_jax.cache import KVCache
from vegas_jax.model.forward import PREFILL_CHUNK, Params, prefill_chunk
from vegas_jax.model.transformer import Transformer
from vegas_jax.sharding import constrain_state
from vegas_jax.spec.loop import begin, decode
from vegas_jax.spec.state import DecodeState, Requests, init_state

_STATIC = ("model", "spec", "processors")


def _finish(state: DecodeState, slot: Int[Array, ""], mesh: Mesh | None = None) -> DecodeState:
    done = state.requests.done.at[slot].set(True)
    return constrain_state(state.replace(requests=state.requests.replace(done=done)), mesh)


prefill_chunk_jit = jax.jit(prefill_chunk, static_argnames="model", donate_argnames="cache")
begin_jit = jax.jit(begin, static_argnames=_STATIC, donate_argnames="state")
decode_jit = jax.jit(decode, static_argnames=_STATIC, donate_argnames="state")
finish_jit = jax.jit(_finish, static_argnames="mesh", donate_argnames="state")
# On a mesh, where no device should hold a whole empty cache first.
init_jit = jax.jit(init_state, static_argnames=("model", "spec", "sampling", "batch", "max_len"))


@functools.cache
def _replicate(mesh: Mesh) -> Callable[[Requests], Requests]:
    return jax.jit(lambda requests: requests, out_shardings=NamedSharding(mesh, PartitionSpec()))


def on_host(requests: Requests, mesh: Mesh | None) -> Requests:
    """The requests as numpy arrays, in every process."""
    host: Requests = jax.device_get(requests if mesh is None else _replicate(mesh)(requests))
    return host


def prefill_slot(
    model: Transformer, params: Params, cache: KVCache, tokens: Sequence[int], slot: int
) -> KVCache:
    """Writes a prompt into one slot of the cache, chunk by chunk of one fixed shape."""
    for start in range(0, len(tokens), PREFILL_CHUNK):
        piece = tokens[start : start + PREFILL_CHUNK]
        padded = np.zeros((1, PREFILL_CHUNK), np.int32)
        padded[0, : len(piece)] = piece
        _, cache = prefill_chunk_jit(
            model=model,
            params=params,
            cache=cache,
            tokens=padded,
            starts=np.array([start], np.int32),
            counts=np.array([len(piece)], np.int32),
            slots=np.array([slot], np.int32),
        )
    return cache
