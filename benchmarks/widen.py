"""Grows a checkpoint into a larger shape that computes the same function.

The wide model costs what its shape costs and accepts drafts as the small one does, so that the
speed of a large model can be measured, with acceptance from real text, without its weights.

- Hidden channels, feed-forward channels and vocabulary are padded. What reads padding is random,
  since zeros cost a GPU less power; what writes to it is zero.
- RMS norms divide by more channels: their float32 weights are scaled by sqrt(old / new), their eps
  by old / new. The norms of queries and keys, over head_dim, keep their weights; the eps is theirs
  too, and changes them by less than float32 shows.
- Query and KV heads are repeated in whole groups, and the output projection divided by the number
  of copies.
- Further layers have random weights and add nothing: their two output projections are zero.
- One padding channel is a tiny constant that the head alone reads: it puts the logits of padding
  far below all others.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vegas_jax import KVCache, ModelConfig, Selection
from vegas_jax.cache import LayerCache
from vegas_jax.model.forward import Params
from vegas_jax.model.transformer import Transformer

# The constant, squared, is nothing next to a residual stream's sum of squares. The final norm
# multiplies it, and the head once more.
CONSTANT, GAIN, PADDING_WEIGHT = 2.0**-17, 2.0**27, -64.0
SPREAD = 0.02  # of random weights


def widen(
    model: Transformer, params: Params, config: ModelConfig, seed: int = 0
) -> tuple[Transformer, Params]:
    """The wide model and its weights, made on the default device.

    Args:
      model: the small model.
      params: its weights.
      config: the wide shape; its `rms_norm_eps` is replaced, `rope_theta` must be the same.
      seed: of the random weights.

    Raises:
      ValueError: the shape does not hold the small model.
    """
    old = model.config
    for name in ("head_dim", "rope_theta"):
        _require(getattr(config, name) == getattr(old, name), name, config, f"{getattr(old, name)}")
    for name in ("vocab_size", "num_layers", "intermediate_size"):
        _require(getattr(config, name) >= getattr(old, name), name, config, "no less than before")
    _require(config.hidden_size > old.hidden_size, "hidden_size", config, "more than before")
    whole = config.num_kv_heads % old.num_kv_heads == 0
    _require(whole, "num_kv_heads", config, f"a multiple of {old.num_kv_heads}")
    whole = config.group_size % old.group_size == 0
    _require(whole, "group_size", config, f"a multiple of {old.group_size}")
    _require(not config.tie_word_embeddings, "tie_word_embeddings", config, "False")
    ratio = old.hidden_size / config.hidden_size
    config = dataclasses.replace(config, rms_norm_eps=old.rms_norm_eps * ratio)

    make_layer = jax.jit(functools.partial(_layer, old, config, model.dtype))
    keys = jax.random.split(jax.random.key(seed), config.num_layers + 1)
    wide = {
        f"layers_{i}": make_layer(keys[i], None if source is None else params[f"layers_{source}"])
        for i, source in enumerate(sources(old, config))
    }
    ends = {name: params[name] for name in ("embed", "head", "final_norm") if name in params}
    wide |= jax.jit(functools.partial(_ends, old, config))(keys[-1], ends)
    return dataclasses.replace(model, config=config), wide


def sources(old: ModelConfig, config: ModelConfig) -> list[int | None]:
    """For each layer of the wide model, the layer that it repeats, or None: spread evenly."""
    places = {i * config.num_layers // old.num_layers: i for i in range(old.num_layers)}
    return [places.get(i) for i in range(config.num_layers)]


def widen_cache(old: ModelConfig, config: ModelConfig, cache: KVCache) -> KVCache:
    """The cache that the wide model would have written; further layers hold random numbers."""
    shape = (*cache.layers[0][0].shape[:1], config.num_kv_heads, *cache.layers[0][0].shape[2:])

    @jax.jit
    def repeated(layer: LayerCache) -> LayerCache:
        copies = config.num_kv_heads // old.num_kv_heads
        return jnp.tile(layer[0], (1, copies, 1, 1)), jnp.tile(layer[1], (1, copies, 1, 1))

    @jax.jit
    def random(key: Array) -> LayerCache:
        dtype = cache.layers[0][0].dtype
        first, second = jax.random.split(key)
        return jax.random.normal(first, shape, dtype), jax.random.normal(second, shape, dtype)

    layers = tuple(
        random(jax.random.key(i)) if source is None else repeated(cache.layers[source])
        for i, source in enumerate(sources(old, config))
    )
    return cache.replace(layers=layers)


def widen_selection(old: ModelConfig, config: ModelConfig, selection: Selection) -> Selection:
    """The selection that goes with `widen_cache`: further layers have that of a layer before."""
    before, places = 0, []
    for source in sources(old, config):
        before = before if source is None else source
        places.append(before)
    return selection.replace(blocks=selection.blocks[np.array(places)])


def _require(holds: bool, name: str, config: ModelConfig, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {allowed}, but is {getattr(config, name)}.")


def _layer(
    old: ModelConfig, config: ModelConfig, dtype: jnp.dtype, key: Array, layer: Params | None
) -> Params:
    hidden, dim, inner = config.hidden_size, config.head_dim, config.intermediate_size
    heads, kv_heads = config.num_heads, config.num_kv_heads
    keys = jax.random.split(key, 2)
    qkv = random_weights(keys[0], (hidden, (heads + 2 * kv_heads) * dim), dtype)
    gate_up = random_weights(keys[1], (hidden, 2 * inner), dtype)
    out = jnp.zeros((heads * dim, hidden), dtype)
    down = jnp.zeros((inner, hidden), dtype)
    if layer is None:
        ones = {"scale": jnp.ones((dim,), jnp.float32)}
        norm = {"scale": _padded_norm(old, config, jnp.ones((old.hidden_size,), jnp.float32))}
        return {
            "input_norm": norm,
            "post_norm": norm,
            "attn": {"qkv": qkv, "o": out, "q_norm": ones, "k_norm": ones},
            "mlp": {"gate_up": gate_up, "down": down},
        }

    # Which old head each new one repeats.
    kv_copies = np.arange(kv_heads) % old.num_kv_heads
    copies = kv_copies[:, None] * old.group_size + np.arange(config.group_size) % old.group_size
    q_copies = copies.reshape(-1)
    attn, mlp = layer["attn"], layer["mlp"]
    columns = np.concatenate(
        [
            q_copies,
            old.num_heads + kv_copies,
            old.num_heads + old.num_kv_heads + kv_copies,
        ]
    )
    by_head = attn["qkv"].reshape(old.hidden_size, -1, dim)[:, columns]
    qkv = qkv.at[: old.hidden_size].set(by_head.reshape(old.hidden_size, -1))
    by_head = attn["o"].reshape(-1, dim, old.hidden_size)[q_copies] / (heads // old.num_heads)
    out = out.at[:, : old.hidden_size].set(by_head.reshape(-1, old.hidden_size).astype(dtype))
    for half in range(2):  # gate, up
        start, old_start = half * inner, half * old.intermediate_size
        piece = mlp["gate_up"][:, old_start : old_start + old.intermediate_size]
        place = (slice(old.hidden_size), slice(start, start + old.intermediate_size))
        gate_up = gate_up.at[place].set(piece)
    down = down.at[: old.intermediate_size, : old.hidden_size].set(mlp["down"])
    return {
        "input_norm": {"scale": _padded_norm(old, config, layer["input_norm"]["scale"])},
        "post_norm": {"scale": _padded_norm(old, config, layer["post_norm"]["scale"])},
        "attn": {"qkv": qkv, "o": out, "q_norm": attn["q_norm"], "k_norm": attn["k_norm"]},
        "mlp": {"gate_up": gate_up, "down": down},
    }


def _ends(old: ModelConfig, config: ModelConfig, key: Array, ends: Params) -> Params:
    embed = ends["embed"]
    vocab, hidden = embed.shape
    wide_embed = jnp.zeros((config.vocab_size, config.hidden_size), embed.dtype)
    wide_embed = wide_embed.at[:vocab, :hidden].set(embed).at[:, hidden].set(CONSTANT)
    head = random_weights(key, (config.hidden_size, config.vocab_size), embed.dtype)
    small_head = ends.get("head", embed.T)
    head = head.at[:hidden, :vocab].set(small_head)
    head = head.at[hidden, :vocab].set(0).at[hidden, vocab:].set(PADDING_WEIGHT)
    norm = _padded_norm(old, config, ends["final_norm"]["scale"]).at[hidden].set(GAIN)
    return {"embed": wide_embed, "head": head, "final_norm": {"scale": norm}}


def _padded_norm(
    old: ModelConfig, config: ModelConfig, scale: Float[Array, " E"]
) -> Float[Array, " wide"]:
    """0 for padding, so that random weights may read it; see the module's text."""
    padding = (0, config.hidden_size - old.hidden_size)
    return jnp.pad(scale * math.sqrt(old.hidden_size / config.hidden_size), padding)


def random_weights(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """Normally distributed, drawn in their own dtype: large ones need no float32 copy."""
    return jax.random.normal(key, shape, dtype) * jnp.asarray(SPREAD, dtype)
