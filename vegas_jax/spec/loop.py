"""From prompts to tokens: prefill, and the while loop over rounds."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from vegas_jax.cache import KVCache
from vegas_jax.config import SpecConfig
from vegas_jax.model.forward import PREFILL_CHUNK, Params, prefill_chunk
from vegas_jax.model.transformer import Transformer
from vegas_jax.sampling import Processors
from vegas_jax.sharding import constrain_state
from vegas_jax.spec.round import accept, commit, select, spec_round, verify
from vegas_jax.spec.state import DecodeState, Requests


def begin(
    model: Transformer,
    params: Params,
    state: DecodeState,
    requests: Requests,
    last_tokens: Int[Array, "b"],
    lengths: Int[Array, "b"],
    slots: Int[Array, "b"],
    spec: SpecConfig,
    processors: Processors,
) -> DecodeState:
    """Starts requests whose prompts, all but the last token, stand in the cache.

    The last prompt token takes the way of every later round: a verification, with T = 1, gives the
    first logits and the first key scores, so the very first draft already has its keys. Other slots
    are left as they are, bit for bit.

    Args:
      state: all slots.
      requests: the new requests, b of them.
      last_tokens: each prompt's last token.
      lengths: prompt tokens already in the cache: the prompt's length - 1.
      slots: which slot each request takes.
    """
    cache = state.cache.replace(lengths=state.cache.lengths.at[slots].set(lengths))
    logits, cache, scores = verify(model, params, cache, last_tokens[:, None], spec, slots)
    no_drafts = jnp.zeros((last_tokens.shape[0], 0), jnp.int32)
    accepted, following = accept(logits, no_drafts, None, requests, lengths, spec, processors)
    requests, new_lengths = commit(
        requests, lengths, logits, no_drafts, accepted, following, first=True
    )
    selection = select(spec, scores, lengths, accepted, model.kernels, model.mesh)
    if state.selection is not None and selection is not None:
        selection = state.selection.put(slots, selection)
    state = DecodeState(
        cache=cache.replace(lengths=cache.lengths.at[slots].set(new_lengths)),
        requests=state.requests.put(slots, requests),
        selection=selection,
    )
    return constrain_state(state, model.mesh)


def prefill(
    model: Transformer,
    params: Params,
    state: DecodeState,
    requests: Requests,
    tokens: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    spec: SpecConfig,
    processors: Processors,
) -> DecodeState:
    """Fills every slot with a right-padded prompt (lengths >= 1) and emits its first token.

    Works in chunks of one fixed shape, as many as the longest prompt needs; all but the last token
    of each prompt is prefilled, the last begins the decoding.
    """
    batch, width = tokens.shape
    chunk = min(PREFILL_CHUNK, width)
    padded = jnp.pad(tokens, ((0, 0), (0, -width % chunk)))
    before_last = lengths - 1

    def fill(i: Array, cache: KVCache) -> KVCache:
        start = jnp.full(batch, i * chunk, jnp.int32)
        piece = jax.lax.dynamic_slice_in_dim(padded, i * chunk, chunk, axis=1)
        _, cache = prefill_chunk(model, params, cache, piece, start, jnp.zeros_like(start))
        return cache

    num_chunks = (before_last.max() + chunk - 1) // chunk
    cache = jax.lax.fori_loop(0, num_chunks, fill, state.cache)
    last_tokens = jnp.take_along_axis(tokens, before_last[:, None], axis=1)[:, 0]
    slots = jnp.arange(batch, dtype=jnp.int32)
    return begin(
        model,
        params,
        state.replace(cache=cache),
        requests,
        last_tokens,
        before_last,
        slots,
        spec,
        processors,
    )


def decode(
    model: Transformer,
    params: Params,
    state: DecodeState,
    spec: SpecConfig,
    processors: Processors,
    max_rounds: Int[Array, ""] | int = 2**31 - 1,
    stop_on_any_done: Bool[Array, ""] | bool = False,
) -> DecodeState:
    """Rounds until every sequence is done: one `lax.while_loop`, nothing goes to the host.

    Args:
      max_rounds: return after so many rounds in any case; traced.
      stop_on_any_done: return as soon as one sequence is done, so that its slot can be refilled;
        traced.

    Also returns when logits stop being finite, see `Requests.bad_position`.
    """
    max_rounds = jnp.asarray(max_rounds, jnp.int32)
    stop_on_any_done = jnp.asarray(stop_on_any_done, bool)

    def unfinished(carry: tuple[DecodeState, Array]) -> Array:
        state, rounds = carry
        done = state.requests.done
        finished = done.all() | (stop_on_any_done & done.any())
        return (rounds < max_rounds) & ~finished & (state.requests.bad_position < 0).all()

    def body(carry: tuple[DecodeState, Array]) -> tuple[DecodeState, Array]:
        state, rounds = carry
        return spec_round(model, params, state, spec, processors), rounds + 1

    state, _ = jax.lax.while_loop(unfinished, body, (state, jnp.int32(0)))
    return state
