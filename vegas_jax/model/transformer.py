"""Qwen3 dense transformer (model card: Qwen/Qwen3-8B) in Flax linen, applied as a pure function.

The model owns weights and arithmetic only. Which keys a token attends to is not its business: every
layer writes the new keys and values into the cache it is handed and calls `attend`. Prefill, draft
and verify are one forward pass with three different `attend`.

Shapes: b batch rows, T query tokens, E hidden size, H query heads, K KV heads, D head_dim,
F intermediate size, V vocabulary, S cache rows.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vegas_jax.cache import LayerCache, write
from vegas_jax.config import ModelConfig
from vegas_jax.model.rope import apply_rope, rope_angles

# (layer index, q [b,T,H,D], k and v [B,K,S,D]) -> (output [b,T,H,D], any side output of the layer)
Attend = Callable[[int, Array, Array, Array], tuple[Array, Any]]

_init = nn.initializers.normal(0.02)


def precision_of(dtype: jnp.dtype) -> jax.lax.Precision:
    """float32 means float32: by default a GPU multiplies in TF32 and a TPU in bfloat16."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def linear(x: Float[Array, "b T i"], weight: Float[Array, "i o"]) -> Float[Array, "b T o"]:
    """x @ weight in the compute dtype."""
    return jnp.einsum("bti,io->bto", x, weight, precision=precision_of(x.dtype))


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv 1910.07467), computed in float32 with float32 weights."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "... n"]) -> Float[Array, "... n"]:
        """Normalises the last axis."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.eps)
        return (wide * jnp.expand_dims(scale, range(x.ndim - 1))).astype(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with q/k norm; `attend` decides which cache rows a query sees."""

    config: ModelConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "b T E"],
        rope: tuple[Array, Array],
        cache: LayerCache,
        positions: Int[Array, "b T"],
        slots: Int[Array, "b"],
        attend: Callable[[Array, Array, Array], tuple[Array, Any]],
    ) -> tuple[Float[Array, "b T E"], LayerCache, Any]:
        """Writes this layer's keys and values at `positions`, then attends."""
        c = self.config
        b, t, _ = x.shape
        heads, kv_heads, dim = c.num_heads, c.num_kv_heads, c.head_dim
        qkv = self.param("qkv", _init, (c.hidden_size, (heads + 2 * kv_heads) * dim), self.dtype)
        o = self.param("o", _init, (heads * dim, c.hidden_size), self.dtype)

        fused = linear(x, qkv).reshape(b, t, heads + 2 * kv_heads, dim)
        q, k, v = jnp.split(fused, [heads, heads + kv_heads], axis=2)
        q = apply_rope(RMSNorm(c.rms_norm_eps, name="q_norm")(q), *rope)  # [b, T, H, D]
        k = apply_rope(RMSNorm(c.rms_norm_eps, name="k_norm")(k), *rope)  # [b, T, K, D]

        cache = write(cache, k, v, positions, slots)
        out, side = attend(q, *cache)
        return linear(out.reshape(b, t, heads * dim), o), cache, side


class MLP(nn.Module):
    """SwiGLU feed-forward (arXiv 2002.05202) with a fused gate/up product."""

    config: ModelConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "b T E"]) -> Float[Array, "b T E"]:
        """down(silu(gate(x)) * up(x))."""
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        gate_up = self.param("gate_up", _init, (hidden, 2 * inner), self.dtype)
        down = self.param("down", _init, (inner, hidden), self.dtype)
        gate, up = jnp.split(linear(x, gate_up), 2, axis=-1)
        return linear(nn.silu(gate) * up, down)


class Block(nn.Module):
    """One pre-norm transformer layer."""

    config: ModelConfig
    dtype: jnp.dtype

    def setup(self) -> None:
        """Names the four parts as the parameter tree does."""
        self.input_norm = RMSNorm(self.config.rms_norm_eps)
        self.attn = Attention(self.config, self.dtype)
        self.post_norm = RMSNorm(self.config.rms_norm_eps)
        self.mlp = MLP(self.config, self.dtype)

    def __call__(
        self,
        x: Float[Array, "b T E"],
        rope: tuple[Array, Array],
        cache: LayerCache,
        positions: Int[Array, "b T"],
        slots: Int[Array, "b"],
        attend: Callable[[Array, Array, Array], tuple[Array, Any]],
    ) -> tuple[Float[Array, "b T E"], LayerCache, Any]:
        """Attention, then feed-forward, each added to the residual stream."""
        out, cache, side = self.attn(self.input_norm(x), rope, cache, positions, slots, attend)
        x = x + out
        return x + self.mlp(self.post_norm(x)), cache, side


class Transformer(nn.Module):
    """The whole model; `apply` it with {"params": params}.

    Attributes:
      config: the architecture.
      dtype: of weights, cache and products (bfloat16, float16 or float32); softmax, norms and
        logits are float32 always.
      kernels: which implementation of the attention ops runs, see `pallas_kernels`.
    """

    config: ModelConfig
    dtype: jnp.dtype = jnp.dtype(jnp.float32)
    kernels: str = "auto"

    def setup(self) -> None:
        """Names the parts as the parameter tree does."""
        c = self.config
        self.embed = self.param("embed", _init, (c.vocab_size, c.hidden_size), self.dtype)
        self.layers = [Block(c, self.dtype) for _ in range(c.num_layers)]
        self.final_norm = RMSNorm(c.rms_norm_eps)
        if not c.tie_word_embeddings:
            self.head = self.param("head", _init, (c.hidden_size, c.vocab_size), self.dtype)

    def __call__(
        self,
        tokens: Int[Array, "b T"],
        positions: Int[Array, "b T"],
        caches: tuple[LayerCache, ...],
        slots: Int[Array, "b"],
        attend: Attend,
    ) -> tuple[Float[Array, "b T E"], tuple[LayerCache, ...], tuple[Any, ...]]:
        """Final hidden states, the cache with the tokens' K/V written, side outputs per layer."""
        rope = rope_angles(positions, self.config.head_dim, self.config.rope_theta)
        x = self.embed[tokens]
        new_caches, sides = [], []
        for i, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):

            def attend_here(q: Array, k: Array, v: Array, i: int = i) -> tuple[Array, Any]:
                return attend(i, q, k, v)

            x, cache, side = layer(x, rope, cache, positions, slots, attend_here)
            new_caches.append(cache)
            sides.append(side)
        return self.final_norm(x), tuple(new_caches), tuple(sides)

    def unembed(self, hidden: Float[Array, "b T E"]) -> Float[Array, "b T V"]:
        """Logits in float32; hand it only the rows whose logits are needed."""
        weight, equation = (
            (self.embed, "bte,ve->btv")
            if self.config.tie_word_embeddings
            else (self.head, "bte,ev->btv")
        )
        return jnp.einsum(
            equation,
            hidden,
            weight,
            precision=precision_of(self.dtype),
            preferred_element_type=jnp.float32,
        )
