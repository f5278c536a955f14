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
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from pallas_kernels.precision import precision_of
from vegas_jax.cache import LayerCache
from vegas_jax.model.config import ModelConfig
from vegas_jax.model.experts import Experts
from vegas_jax.model.layers import RMSNorm, add_bias, init_weight, linear
from vegas_jax.model.rope import apply_rope, rope_angles
from vegas_jax.sharded_ops import write
from vegas_jax.sharding import as_mesh, check_divisible, constrain_rows

# (layer index, q [b,T,H,D], k and v [B,K,S,D], sinks [H] or None) -> (output [b,T,H,D], any side
# output of the layer)
Attend = Callable[[int, Array, Array, Array, Array | None], tuple[Array, Any]]


class Attention(nn.Module):
    """Grouped-query attention; `attend` decides which cache rows a query sees."""

    config: ModelConfig
    dtype: jnp.dtype
    mesh: Mesh | None = None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "b T E"],
        rope: tuple[Array, Array],
        cache: LayerCache,
        positions: Int[Array, "b T"],
        slots: Int[Array, "b"] | None,
        attend: Callable[[Array, Array, Array, Array | None], tuple[Array, Any]],
    ) -> tuple[Float[Array, "b T E"], LayerCache, Any]:
        """Writes this layer's keys and values at `positions`, then attends.

        Row i belongs to sequence slots[i] of the cache; None: to sequence i.
        """
        c = self.config
        b, t, _ = x.shape
        heads, kv_heads, dim = c.num_heads, c.num_kv_heads, c.head_dim
        columns: tuple[int, ...] = ((heads + 2 * kv_heads) * dim,)
        if self.mesh is not None:
            columns = (kv_heads, c.group_size + 2, dim)  # can be cut between KV heads
        qkv = self.param("qkv", init_weight, (c.hidden_size, *columns), self.dtype)
        o = self.param("o", init_weight, (heads * dim, c.hidden_size), self.dtype)

        fused = linear(x, qkv)
        if c.qkv_bias:
            bias = self.param("qkv_bias", nn.initializers.zeros, columns, self.dtype)
            fused = add_bias(fused, bias)
        if self.mesh is None:
            fused = fused.reshape(b, t, heads + 2 * kv_heads, dim)
            q, k, v = jnp.split(fused, [heads, heads + kv_heads], axis=2)
        else:
            q, k, v = jnp.split(fused, [c.group_size, c.group_size + 1], axis=3)
            q, k, v = (part.reshape(b, t, -1, dim) for part in (q, k, v))
        if c.qk_norm:
            q, k = (
                RMSNorm(c.rms_norm_eps, name="q_norm")(q),
                RMSNorm(c.rms_norm_eps, name="k_norm")(k),
            )
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)  # [b, T, H, D], [b, T, K, D]
        sinks = (
            self.param("sinks", nn.initializers.zeros, (heads,), jnp.float32) if c.sinks else None
        )

        cache = write(cache, k, v, positions, slots, self.mesh)
        out, side = attend(q, *cache, sinks)
        out = constrain_rows(linear(out.reshape(b, t, heads * dim), o), self.mesh)
        if c.o_bias:
            bias = self.param("o_bias", nn.initializers.zeros, o.shape[1:], self.dtype)
            out = add_bias(out, bias)
        return out, cache, side


class MLP(nn.Module):
    """SwiGLU feed-forward (arXiv 2002.05202) with a fused gate/up product."""

    config: ModelConfig
    dtype: jnp.dtype
    mesh: Mesh | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "b T E"]) -> Float[Array, "b T E"]:
        """down(silu(gate(x)) * up(x))."""
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        # On a mesh both can be cut alike.
        columns = (2 * inner,) if self.mesh is None else (2, inner)
        gate_up = self.param("gate_up", init_weight, (hidden, *columns), self.dtype)
        down = self.param("down", init_weight, (inner, hidden), self.dtype)
        both = linear(x, gate_up)
        gate, up = (
            jnp.split(both, 2, axis=2) if self.mesh is None else (both[:, :, 0], both[:, :, 1])
        )
        return constrain_rows(linear(nn.silu(gate) * up, down), self.mesh)


class Block(nn.Module):
    """One pre-norm transformer layer; its feed-forward may be a mixture of experts."""

    config: ModelConfig
    dtype: jnp.dtype
    layer: int
    kernels: str
    mesh: Mesh | None = None

    def setup(self) -> None:
        """Names the four parts as the parameter tree does."""
        c = self.config
        self.input_norm = RMSNorm(c.rms_norm_eps)
        self.attn = Attention(c, self.dtype, self.mesh)
        self.post_norm = RMSNorm(c.rms_norm_eps)
        self.mlp: nn.Module = (
            Experts(c.hidden_size, c.moe, self.dtype, self.kernels, self.mesh)
            if c.moe is not None and self.layer in c.moe.layers
            else MLP(c, self.dtype, self.mesh)
        )

    def __call__(
        self,
        x: Float[Array, "b T E"],
        rope: tuple[Array, Array],
        cache: LayerCache,
        positions: Int[Array, "b T"],
        slots: Int[Array, "b"] | None,
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
      mesh: devices that share the work, with an axis `data`, an axis `model` or both; None is one
        device. Its parameters are those of `vegas_jax.sharding.shard_params`.

    Raises:
      InputError: the mesh has other axes, or does not divide the model's heads or experts.
    """

    config: ModelConfig
    dtype: jnp.dtype = jnp.dtype(jnp.float32)
    kernels: str = "auto"
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        if self.mesh is not None:
            object.__setattr__(self, "mesh", as_mesh(self.mesh))
            check_divisible(self.config, self.mesh)
        super().__post_init__()

    def setup(self) -> None:
        """Names the parts as the parameter tree does."""
        c = self.config
        self.embed = self.param("embed", init_weight, (c.vocab_size, c.hidden_size), self.dtype)
        self.layers = [
            Block(c, self.dtype, i, self.kernels, self.mesh) for i in range(c.num_layers)
        ]
        self.final_norm = RMSNorm(c.rms_norm_eps)
        if not c.tie_word_embeddings:
            self.head = self.param("head", init_weight, (c.hidden_size, c.vocab_size), self.dtype)

    def __call__(
        self,
        tokens: Int[Array, "b T"],
        positions: Int[Array, "b T"],
        caches: tuple[LayerCache, ...],
        slots: Int[Array, "b"] | None,
        attend: Attend,
    ) -> tuple[Float[Array, "b T E"], tuple[LayerCache, ...], tuple[Any, ...]]:
        """Final hidden states, the cache with the tokens' K/V written, side outputs per layer."""
        rope = rope_angles(self.config, positions)
        x = constrain_rows(self.embed[tokens], self.mesh)
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
