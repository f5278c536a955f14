"""Mixture of experts (model cards: Qwen/Qwen3-30B-A3B, openai/gpt-oss-20b).

Only the chosen experts are computed, exactly, however tokens are spread over them: the (token,
expert) pairs are sorted by expert, and each expert multiplies its own rows.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import MXFP4, grouped_matmul
from vegas_jax.model.config import MoEConfig
from vegas_jax.model.layers import add_bias, init_weight, precision_of

GATE_SLOPE = 1.702  # of gpt-oss's sigmoid


class Experts(nn.Module):
    """Routes each token to its experts and adds up what they give, by the router's weights."""

    hidden_size: int
    config: MoEConfig
    dtype: jnp.dtype
    kernels: str

    @nn.compact
    def __call__(self, x: Float[Array, "b T E"]) -> Float[Array, "b T E"]:
        """Sum over the chosen experts of weight * expert(x)."""
        c, hidden = self.config, self.hidden_size
        router = self.param("router", init_weight, (hidden, c.num_experts), self.dtype)
        logits = jnp.einsum(
            "bti,ix->btx",
            x,
            router,
            precision=precision_of(x.dtype),
            preferred_element_type=jnp.float32,
        ).reshape(-1, c.num_experts)
        if c.biases:
            logits = add_bias(logits, self._vector("router_bias", c.num_experts))
        experts, weights = route(c, logits)

        rows = x.reshape(-1, hidden)
        # Pair i*k + j is token i with its j-th expert.
        order = jnp.argsort(experts.reshape(-1), stable=True)
        expert = experts.reshape(-1)[order]
        sizes = jnp.bincount(expert, length=c.num_experts).astype(jnp.int32)
        inner = self._multiply(rows[order // c.num_experts_per_tok], sizes, expert, "gate_up")
        outer = self._multiply(activate(c, inner), sizes, expert, "down")
        # Back to the tokens by the inverse permutation: a sum whose order is always the same.
        pairs = outer[jnp.argsort(order)].reshape(-1, c.num_experts_per_tok, hidden)
        mixed = (pairs.astype(jnp.float32) * weights[:, :, None]).sum(axis=1)
        return mixed.astype(x.dtype).reshape(x.shape)

    def _multiply(
        self,
        rows: Float[Array, "p i"],
        sizes: Int[Array, " X"],
        expert: Int[Array, " p"],
        name: str,
    ) -> Float[Array, "p o"]:
        """Each expert's rows by its matrix; both products of an expert go through here."""
        c, hidden, inner = self.config, self.hidden_size, self.config.intermediate_size
        inputs, outputs = (hidden, 2 * inner) if name == "gate_up" else (inner, hidden)
        matrices: Any
        if c.packed:
            shape = (c.num_experts, outputs, inputs // 32)
            zeros = nn.initializers.zeros
            matrices = MXFP4(
                self.param(f"{name}_blocks", zeros, (*shape, 16), jnp.uint8),
                self.param(f"{name}_scales", zeros, shape, jnp.uint8),
            )
        else:
            shape = (c.num_experts, inputs, outputs)
            matrices = self.param(name, init_weight, shape, self.dtype)
        kernels = "reference" if self.kernels == "reference" else "auto"
        product = grouped_matmul(rows, matrices, sizes, kernels=kernels)
        if c.biases:
            product += self._vector(f"{name}_bias", c.num_experts, outputs)[expert]
        return product

    def _vector(self, name: str, *shape: int) -> Array:
        bias: Array = self.param(name, nn.initializers.zeros, shape, self.dtype)
        return bias


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
