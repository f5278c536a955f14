"""Expected acceptance along real text: less noise than decoding, and the same text for all methods.

The text is taken as it stands: a round verifies its next gamma + 1 tokens, and the next round's
drafts are scored on those that follow, given the true ones before them. A draft's acceptance is
the sum over the vocabulary of min(p, q), p from full attention, q from the keys that were chosen.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vegas_jax import KVCache, SpecConfig, Transformer, drafters, spec
from vegas_jax.model.forward import Params, forward, unembed

TEMPERATURE = 0.8


@functools.partial(jax.jit, static_argnames=("model", "config"), donate_argnames="cache")
def forced_round(
    model: Transformer,
    params: Params,
    cache: KVCache,
    selection: Any,
    tokens: jax.Array,
    config: SpecConfig,
) -> tuple[jax.Array, KVCache, Any]:
    """Acceptance of drafts 1 .. gamma, the cache with the tokens in it, the next selection."""
    drafter, gamma = drafters.get(config), config.num_drafts
    full = tuple(cache.layers[i] for i in model.config.full_layers)
    chosen = drafter.prepare(
        config, selection, cache.replace(layers=full), model.kernels, model.mesh
    )
    attend = drafter.attend(config, chosen, cache.lengths, jnp.int32(0), model.kernels, model.mesh)
    hidden, cache, _ = forward(model, params, cache, tokens[:, :gamma], cache.lengths, attend)
    q = jax.nn.softmax(unembed(model, params, hidden) / TEMPERATURE, axis=-1)
    logits, cache, scores = spec.verify(model, params, cache, tokens, config)
    p = jax.nn.softmax(logits[:, :gamma] / TEMPERATURE, axis=-1)
    all_drafts = jnp.full_like(cache.lengths, gamma)
    selection = spec.select(config, scores, cache.lengths, all_drafts, model.kernels, model.mesh)
    cache = cache.replace(lengths=cache.lengths + gamma + 1)
    return jnp.minimum(p, q).sum(axis=-1)[0], cache, selection


def expected_acceptance(
    model: Transformer,
    params: Params,
    cache: KVCache,
    text: list[int],
    config: SpecConfig,
) -> np.ndarray:
    """Acceptance by round and draft, [rounds, gamma].

    Args:
      model: with its parameters.
      params: see there.
      cache: of the first tokens, of one sequence; it is donated.
      text: whole; the rounds that fit are taken.
      config: of the method.
    """
    selection = drafters.get(config).init(config, model.config, 1, cache.rows)
    size, start, found = config.num_drafts + 1, int(cache.lengths[0]), []
    for at in range(start, len(text) - size + 1, size):
        tokens = jnp.array([text[at : at + size]], jnp.int32)
        accepted, cache, selection = forced_round(model, params, cache, selection, tokens, config)
        found.append(accepted)
    # The first round had no keys to choose from.
    return np.array(found[1:])


def summary(acceptance: np.ndarray) -> tuple[float, float, float]:
    """Mean acceptance, its standard error, and tokens a round if drafts were independent."""
    rounds = acceptance.mean(axis=1)
    error = rounds.std(ddof=1) / len(rounds) ** 0.5
    tokens = 1 + np.cumprod(acceptance, axis=1).sum(axis=1).mean()
    return float(rounds.mean()), float(error), float(tokens)
