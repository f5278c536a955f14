"""The jitted entry points, shared by every Generator of a process.

Model, SpecConfig and Processors are static; everything else is traced, so neither prompts nor
lengths nor sampling values recompile. The state (or cache) is donated: it is updated in place, and
the one handed in is gone afterwards.
"""

import jax
from jaxtyping import Array, Int

from vegas_jax.model.forward import prefill_chunk
from vegas_jax.spec.loop import begin, decode
from vegas_jax.spec.state import DecodeState

_STATIC = ("model", "spec", "processors")


def _finish(state: DecodeState, slot: Int[Array, ""]) -> DecodeState:
    done = state.requests.done.at[slot].set(True)
    return state.replace(requests=state.requests.replace(done=done))


def _prefill_cache(model, params, cache, tokens, starts, counts, slots):  # type: ignore[no-untyped-def]
    return prefill_chunk(model, params, cache, tokens, starts, counts, slots)[1]


prefill_jit = jax.jit(_prefill_cache, static_argnames="model", donate_argnames="cache")
begin_jit = jax.jit(begin, static_argnames=_STATIC, donate_argnames="state")
decode_jit = jax.jit(decode, static_argnames=_STATIC, donate_argnames="state")
finish_jit = jax.jit(_finish, donate_argnames="state")
