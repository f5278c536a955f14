"""A decoder-only transformer in Flax linen, applied as a pure function: Qwen3, Llama, gpt-oss, ...

The model owns weights and arithmetic only; where architectures differ, `ModelConfig` says. Which
keys a token attends to is not its business: every layer writes the new keys and values into the
cache it is handed and calls `attend`. Prefill, draft and verify are one forward pass with three
different `attend`.

Shapes: b batch rows, T query tokens, E hidden size, H query heads, K KV heads, D head_dim,
F intermediate size, V vocabulary, S cache rows, X experts.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vegas_jax.cache import LayerCache, write
from vegas_jax.model.config import ModelConfig
from vegas_jax.model.experts import Experts
from vegas_jax.model.layers import RMSNorm, add_bias, init_weight, linear, precision_of
from vegas_jax.model.rope import apply_rope, rope_angles

# (layer index, q [b,T,H,D], k and v [B,K,S,D], sinks [H] or None) -> (output [b,T,H,D], any side
# output of the layer)
Attend = Callable[[int, Array, Array, Array, Array | None], tuple[Array, Any]]


class Attention(nn.Module):
    """Grouped-query attention; `attend` decides which cache rows a query sees."""

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
        attend: Callable[[Array, Array, Array, Array | None], tuple[Array, Any]],
    ) -> tuple[Float[Array, "b T E"], LayerCache, Any]:
        """Writes this layer's keys and values at `positions`, then attends."""
        c = self.config
        b, t, _ = x.shape
        heads, kv_heads, dim = c.num_heads, c.num_kv_heads, c.head_dim
        qkv = self.param(
            "qkv", init_weight, (c.hidden_size, (heads + 2 * kv_heads) * dim), self.dtype
        )
        o = self.param("o", init_weight, (heads * dim, c.hidden_size), self.dtype)

        fused = linear(x, qkv)
        if c.qkv_bias:
            bias = self.param("qkv_bias", nn.initializers.zeros, qkv.shape[1:], self.dtype)
            fused = add_bias(fused, bias)
        fused = fused.reshape(b, t, heads + 2 * kv_heads, dim)
        q, k, v = jnp.split(fused, [heads, heads + kv_heads], axis=2)
        if c.qk_norm:
            q, k = (
                RMSNorm(c.rms_norm_eps, name="q_norm")(q),
                RMSNorm(c.rms_norm_eps, name="k_norm")(k),
            )
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)  # [b, T, H, D], [b, T, K, D]
        sinks = (
            self.param("sinks", nn.initializers.zeros, (heads,), jnp.float32) if c.sinks else None
        )

        cache = write(cache, k, v, positions, slots)
        out, side = attend(q, *cache, sinks)
        out = linear(out.reshape(b, t, heads * dim), o)
        if c.o_bias:
            bias = self.param("o_bias", nn.initializers.zeros, o.shape[1:], self.dtype)
            out = add_bias(out, bias)
        return out, cache, side


class MLP(nn.Module):
    """SwiGLU feed-forward (arXiv 2002.05202) with a fused gate/up product."""

    config: ModelConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "b T E"]) -> Float[Array, "b T E"]:
        """down(silu(gate(x)) * up(x))."""
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        gate_up = self.param("gate_up", init_weight, (hidden, 2 * inner), self.dtype)
        down = self.param("down", init_weight, (inner, hidden), self.dtype)
        gate, up = jnp.split(linear(x, gate_up), 2, axis=-1)
        return linear(nn.silu(gate) * up, down)


class Block(nn.Module):
    """One pre-norm transformer layer; its feed-forward may be a mixture of experts."""

    config: ModelConfig
    dtype: jnp.dtype
    layer: int
    kernels: str

    def setup(self) -> None:
        """Names the four parts as the parameter tree does."""
        c = self.config
        self.input_norm = RMSNorm(c.rms_norm_eps)
        self.attn = Attention(c, self.dtype)
        self.post_norm = RMSNorm(c.rms_norm_eps)
        self.mlp: nn.Module = (
            Experts(c.hidden_size, c.moe, self.dtype, self.kernels)
            if c.moe is not None and self.layer in c.moe.layers
            else MLP(c, self.dtype)
        )

    def __call__(
        self,
        x: Float[Array, "b T E"],
        rope: tuple[Array, Array],
        cache: LayerCache,
        positions: Int[Array, "b T"],
        slots: Int[Array, "b"],
        attend: Callable[[Array, Array, Array, Array | None], tuple[Array, Any]],
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
      kernels: which implementation of the ops runs, see `pallas_kernels`.
    """

    config: ModelConfig
    dtype: jnp.dtype = jnp.dtype(jnp.float32)
    kernels: str = "auto"

    def setup(self) -> None:
        """Names the parts as the parameter tree does."""
        c = self.config
        self.embed = self.param("embed", init_weight, (c.vocab_size, c.hidden_size), self.dtype)
        self.layers = [Block(c, self.dtype, i, self.kernels) for i in range(c.num_layers)]
        self.final_norm = RMSNorm(c.rms_norm_eps)
        if not c.tie_word_embeddings:
            self.head = self.param("head", init_weight, (c.hidden_size, c.vocab_size), self.dtype)

    def __call__(
        self,
        tokens: Int[Array, "b T"],
        positions: Int[Array, "b T"],
        caches: tuple[LayerCache, ...],
        slots: Int[Array, "b"],
        attend: Attend,
    ) -> tuple[Float[Array, "b T E"], tuple[LayerCache, ...], tuple[Any, ...]]:
        """Final hidden states, the cache with the tokens' K/V written, side outputs per layer."""
        rope = rope_angles(self.config, positions)
        x = self.embed[tokens]
        new_caches, sides = [], []
        for i, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):

            def attend_here(*arguments: Any, i: int = i) -> tuple[Array, Any]:
                return attend(i, *arguments)

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
