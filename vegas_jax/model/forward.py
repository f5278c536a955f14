"""The transformer as pure functions of (params, cache, tokens)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import for_other_ops
from vegas_jax.cache import KVCache, init_cache
from vegas_jax.errors import check
from vegas_jax.model.transformer import Attend, Transformer
from vegas_jax.sharded_ops import verify_attention
from vegas_jax.sharding import constrain_cache, constrain_rows, constrain_vocabulary

Params = dict[str, Any]
PREFILL_CHUNK = 512  # tokens of one prefill step; also what cache rows are rounded up to


def forward(
    model: Transformer,
    params: Params,
    cache: KVCache,
    tokens: Int[Array, "b T"],
    starts: Int[Array, "b"],
    attend: Attend,
    slots: Int[Array, "b"] | None = None,
    kernels: str | None = None,
) -> tuple[Float[Array, "b T E"], KVCache, tuple[Any, ...]]:
    """Runs T tokens a row at positions starts..starts+T-1 and writes their K/V into the cache.

    Row i belongs to sequence slots[i] of the cache (None: row i to sequence i). `cache.lengths` is
    left as it is: what becomes verified is the caller's decision.

    `attend` is asked for the layers that see the whole context, by their index among these, and
    theirs are the side outputs. Layers with a sliding window see it in prefill, draft and
    verification alike, through `kernels` (None: the model's).
    """
    config = model.config

    def attend_layer(layer: int, q: Array, k: Array, v: Array, sinks: Any) -> tuple[Array, Any]:
        window = config.window(layer)
        if window is None:
            return attend(config.full_layers.index(layer), q, k, v, sinks)
        out, _, _ = verify_attention(
            q,
            k,
            v,
            starts,
            mesh=model.mesh,
            slots=slots,
            window=window,
            sinks=sinks,
            kernels=model.kernels if kernels is None else kernels,
        )
        return out, None

    positions = starts[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    result: Any = model.apply(
        {"params": params}, tokens, positions, cache.layers, slots, attend_layer
    )
    hidden, layers, sides = result
    return hidden, cache.replace(layers=layers), tuple(sides[i] for i in config.full_layers)


def unembed(
    model: Transformer, params: Params, hidden: Float[Array, "b T E"]
) -> Float[Array, "b T V"]:
    """Logits of hidden states, float32."""
    result: Any = model.apply({"params": params}, hidden, method="unembed")
    # Each device computes those of its part of the vocabulary; drawing a token needs them all.
    return constrain_rows(constrain_vocabulary(result, model.mesh), model.mesh)


def prefill_chunk(
    model: Transformer,
    params: Params,
    cache: KVCache,
    tokens: Int[Array, "b T"],
    starts: Int[Array, "b"],
    counts: Int[Array, "b"],
    slots: Int[Array, "b"] | None = None,
) -> tuple[Float[Array, "b T E"], KVCache]:
    """Writes one chunk of prompt: the first counts[i] of tokens[i], at positions from starts[i].

    Padding beyond `counts` is written too, past the new length, where nothing sees it.
    """

    def attend(layer: int, q: Array, k: Array, v: Array, sinks: Any) -> tuple[Array, None]:
        out, _, _ = verify_attention(
            q, k, v, starts, mesh=model.mesh, slots=slots, sinks=sinks, kernels=kernels
        )
        return out, None

    # The kernels for drafts and verification are not made for so many tokens at once.
    kernels = for_other_ops(model.kernels)
    hidden, cache, _ = forward(model, params, cache, tokens, starts, attend, slots, kernels)
    ends = starts + counts
    lengths = ends if slots is None else cache.lengths.at[slots].set(ends)
    return hidden, constrain_cache(cache.replace(lengths=lengths), model.mesh)


def logits(
    model: Transformer, params: Params, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]
) -> Float[Array, "B T V"]:
    """Logits after every token of right-padded sequences, for scoring.

    Row t predicts token t + 1. Rows at or beyond a sequence's length are 0. Jittable; attention
    runs in chunks, so memory beyond the result grows with T, not with T squared. Ids outside the
    vocabulary are not noticed.

    Raises:
      InputError: `tokens` or `lengths` has another shape.
    """
    tokens, lengths = jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32)
    check(tokens.ndim == 2 and tokens.size > 0, "tokens' shape", tokens.shape, "[B, T]")
    batch, length = tokens.shape
    check(lengths.shape == (batch,), "lengths' shape", lengths.shape, f"[{batch}]")
    chunk = min(PREFILL_CHUNK, length)
    num_chunks = -(-length // chunk)
    padded = jnp.pad(tokens, ((0, 0), (0, num_chunks * chunk - length)))
    cache = init_cache(model.config, batch, num_chunks * chunk, model.dtype, model.mesh)

    def step(cache: KVCache, piece: Array) -> tuple[KVCache, Array]:
        counts = jnp.full(batch, chunk, jnp.int32)
        hidden, cache = prefill_chunk(model, params, cache, piece, cache.lengths, counts)
        return cache, unembed(model, params, hidden)

    pieces = padded.reshape(batch, num_chunks, chunk).swapaxes(0, 1)
    _, rows = jax.lax.scan(step, cache, pieces)  # [chunks, B, chunk, V]
    rows = rows.swapaxes(0, 1).reshape(batch, num_chunks * chunk, -1)[:, :length]
    inside = jnp.arange(length, dtype=jnp.int32)[None, :] < lengths[:, None]
    return jnp.where(inside[:, :, None], rows, 0.0)
