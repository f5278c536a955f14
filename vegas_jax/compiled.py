"""The jitted entry points, shared by every Generator of a process.

Model, SpecConfig and Processors are static; everything else is traced, so neither prompts nor
lengths nor sampling values recompile. The state (or cache) is donated: it is updated in place, and
the one handed in is gone afterwards.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Int

from vegas_jax.cache import KVCache
from vegas_jax.model.forward import PREFILL_CHUNK, Params, prefill_chunk
from vegas_jax.model.transformer import Transformer
from vegas_jax.spec.loop import begin, decode
from vegas_jax.spec.state import DecodeState

_STATIC = ("model", "spec", "processors")


def _finish(state: DecodeState, slot: Int[Array, ""]) -> DecodeState:
    done = state.requests.done.at[slot].set(True)
    return state.replace(requests=state.requests.replace(done=done))


prefill_chunk_jit = jax.jit(prefill_chunk, static_argnames="model", donate_argnames="cache")
begin_jit = jax.jit(begin, static_argnames=_STATIC, donate_argnames="state")
decode_jit = jax.jit(decode, static_argnames=_STATIC, donate_argnames="state")
finish_jit = jax.jit(_finish, donate_argnames="state")


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
