"""Mixture of experts (model cards: Qwen/Qwen3-30B-A3B, openai/gpt-oss-20b).

Only the chosen experts are computed, exactly, however tokens are spread over them: the (token,
expert) pairs are sorted by expert, and each expert multiplies its own rows.
"""

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from pallas_kernels import MXFP4, grouped_matmul
from pallas_kernels.dispatch import for_other_ops
from pallas_kernels.grouped.mxfp4 import BLOCK
from pallas_kernels.precision import precision_of
from vegas_jax.model.config import MoEConfig
from vegas_jax.model.layers import add_bias, init_weight
from vegas_jax.sharded_ops import sum_over_experts

GATE_SLOPE = 1.702  # of gpt-oss's sigmoid


class Experts(nn.Module):
    """Routes each token to its experts and adds up what they give, by the router's weights."""

    hidden_size: int
    config: MoEConfig
    dtype: jnp.dtype
    kernels: str

    mesh: Mesh | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "b T E"]) -> Float[Array, "b T E"]:
        """Sum over the chosen experts of weight * expert(x)."""
        c, hidden = self.config, self.hidden_size
        weights = {"router": self.param("router", init_weight, (hidden, c.num_experts), self.dtype)}
        if c.biases:
            weights["router_bias"] = self._zeros("router_bias", c.num_experts)
        weights |= self._matrices("gate_up", hidden, 2 * c.intermediate_size)
        weights |= self._matrices("down", c.intermediate_size, hidden)
        mix = functools.partial(mixture, c, for_other_ops(self.kernels))
        if self.mesh is not None:
            return sum_over_experts(mix, self.mesh, c.num_experts, x, weights)
        return mix(x, weights).astype(x.dtype)

    def _matrices(self, name: str, inputs: int, outputs: int) -> dict[str, Array]:
        """One product's parameters, of all experts."""
        c, weights = self.config, {}
        if c.packed:
            scales = (c.num_experts, outputs, inputs // BLOCK)
            for part, shape in (("blocks", (*scales, BLOCK // 2)), ("scales", scales)):
                weights[f"{name}_{part}"] = self._zeros(f"{name}_{part}", *shape, dtype=jnp.uint8)
        else:
            shape = (c.num_experts, inputs, outputs)
            weights[name] = self.param(name, init_weight, shape, self.dtype)
        if c.biases:
            weights[f"{name}_bias"] = self._zeros(f"{name}_bias", c.num_experts, outputs)
        return weights

    def _zeros(self, name: str, *shape: int, dtype: Any = None) -> Array:
        leaf: Array = self.param(name, nn.initializers.zeros, shape, dtype or self.dtype)
        return leaf


def mixture(
    config: MoEConfig,
    kernels: str,
    x: Float[Array, "b T E"],
    weights: Mapping[str, Array],
    share: tuple[Int[Array, ""], int] | None = None,
) -> Float[Array, "b T E"]:
    """Sum over each token's experts of weight * expert(x), float32.

    `weights` are the parameters of `Experts`. A share is the number of its first expert and how
    many it has: `weights` has their matrices alone, and the sum is over the chosen among them.
    """
    hidden = x.shape[-1]
    logits = jnp.einsum(
        "bti,ix->btx",
        x,
        weights["router"],
        precision=precision_of(x.dtype),
        preferred_element_type=jnp.float32,
    ).reshape(-1, config.num_experts)
    if config.biases:
        logits = add_bias(logits, weights["router_bias"].astype(jnp.float32))
    experts, shares = route(config, logits)

    rows = x.reshape(-1, hidden)
    # Pair i*k + j is token i with its j-th expert.
    expert, count = experts.reshape(-1), config.num_experts
    if share is not None:
        first, count = share
        own = (expert >= first) & (expert < first + count)
        expert = jnp.where(own, expert - first, count)  # the pairs of others go last
    order = jnp.argsort(expert, stable=True)
    expert = expert[order]
    sizes = jnp.bincount(expert, length=count).astype(jnp.int32)

    def multiply(rows: Float[Array, "p i"], name: str) -> Float[Array, "p o"]:
        matrices = matrices_of(weights, name)
        product = grouped_matmul(rows, matrices, sizes, kernels=kernels)
        if config.biases:
            product += weights[f"{name}_bias"][expert]
        return product

    inner = multiply(rows[order // config.num_experts_per_tok], "gate_up")
    outer = multiply(activate(config, inner), "down")
    if share is not None:
        outer = jnp.where((expert < count)[:, None], outer, jnp.zeros((), outer.dtype))
    # Back to the tokens by the inverse permutation: a sum whose order is always the same.
    place = jnp.arange(len(order), dtype=order.dtype)
    inverse = jnp.zeros_like(order).at[order].set(place, unique_indices=True)
    pairs = outer[inverse].reshape(-1, config.num_experts_per_tok, hidden)
    return (pairs.astype(jnp.float32) * shares[:, :, None]).sum(axis=1).reshape(x.shape)


def matrices_of(weights: Mapping[str, Array], name: str) -> Any:
    """One product's matrices, an expert each: an array, or MXFP4."""
    if name in weights:
        return weights[name]
    return MXFP4(weights[f"{name}_blocks"], weights[f"{name}_scales"])


def route(
    config: MoEConfig, logits: Float[Array, "n X"]
) -> tuple[Int[Array, "n k"], Float[Array, "n k"]]:
    """The chosen experts of each token, and how much each of them counts."""
    best, experts = jax.lax.top_k(logits, config.num_experts_per_tok)
    if config.norm_topk_prob:
        return experts, jax.nn.softmax(best, axis=-1)
    return experts, jnp.exp(best - jax.nn.logsumexp(logits, axis=-1, keepdims=True))


def activate(config: MoEConfig, gate_up: Float[Array, "p f"]) -> Float[Array, "p half"]:
    """SwiGLU, or gpt-oss's with both halves clamped."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    limit = config.swiglu_limit
    if limit is None:
        return nn.silu(gate) * up
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * (gate * nn.sigmoid(GATE_SLOPE * gate))
