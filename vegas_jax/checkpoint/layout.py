"""Which stored tensors make up each of the model's parameters, and how.

Stored matrices are (out, in); parameters are (in, out), used as x @ W, with q, k and v side by side
in one and gate and up in another. Vectors and norm scales are what they are. The tree (V
vocabulary, E hidden size, F intermediate size, H query heads, K KV heads, D head_dim, X experts):

    embed [V, E]
    layers_{i}/input_norm/scale [E]
    layers_{i}/attn/qkv [E, (H + 2 K) D]      all q heads, then k, then v
    layers_{i}/attn/qkv_bias [(H + 2 K) D]
    layers_{i}/attn/{q_norm,k_norm}/scale [D]
    layers_{i}/attn/sinks [H]
    layers_{i}/attn/o [H D, E]                and o_bias [E]
    layers_{i}/post_norm/scale [E]
    layers_{i}/mlp/gate_up [E, 2 F]           gate, then up; with experts [X, E, 2 F]
    layers_{i}/mlp/down [F, E]                                             [X, F, E]
    layers_{i}/mlp/router [E, X]              and router_bias [X], gate_up_bias [X, 2 F],
                                              down_bias [X, E]
    layers_{i}/mlp/{gate_up,down}_{blocks,scales}   instead, of experts that stay MXFP4
    final_norm/scale [E]
    head [E, V]                               only when the embedding is not tied
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from pallas_kernels.grouped.mxfp4 import BIAS, BLOCK, VALUES
from vegas_jax.checkpoint.tensors import Shape, Tensor
from vegas_jax.errors import CheckpointError
from vegas_jax.model.config import ModelConfig, MoEConfig

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
HALVES = ("gate", "up")

Build = Callable[[Sequence[Tensor], Any], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter.

    Attributes:
      sources: the tensors that make it up, with their stored shapes.
      build: reads them, given the model's dtype.
      packed: whether they are bytes rather than floats.
    """

    sources: Mapping[str, Shape]
    build: Build
    packed: bool = False


def plan(config: ModelConfig, names: Collection[str]) -> dict[str, Leaf]:
    """Every parameter by its path; `names` tells which of several layouts experts are stored in."""
    c = config
    leaves = {"embed": Leaf({EMBEDDING: (c.vocab_size, c.hidden_size)}, _as_stored)}
    for i in range(c.num_layers):
        layer = _attention(c)
        if c.moe is not None and i in c.moe.layers:
            layer |= _experts(c.moe, c.hidden_size, {n for n in names if f"layers.{i}.mlp." in n})
        else:
            layer |= _feed_forward(c)
        for path, leaf in layer.items():
            sources = {f"layers.{i}.{name}": shape for name, shape in leaf.sources.items()}
            leaves[f"layers_{i}/{path}"] = dataclasses.replace(leaf, sources=sources)
    leaves["final_norm/scale"] = Leaf({"norm.weight": (c.hidden_size,)}, _scale)
    if not c.tie_word_embeddings:
        leaves["head"] = Leaf({HEAD: (c.vocab_size, c.hidden_size)}, _side_by_side)
    return leaves


def _attention(c: ModelConfig) -> dict[str, Leaf]:
    embed, queries, keys = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    widths = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    leaves = {
        "input_norm/scale": Leaf({"input_layernorm.weight": (embed,)}, _scale),
        "post_norm/scale": Leaf({"post_attention_layernorm.weight": (embed,)}, _scale),
        "attn/qkv": Leaf(
            {f"self_attn.{name}.weight": (width, embed) for name, width in widths.items()},
            _side_by_side,
        ),
        "attn/o": Leaf({"self_attn.o_proj.weight": (embed, queries)}, _side_by_side),
    }
    if c.qkv_bias:
        biases = {f"self_attn.{name}.bias": (width,) for name, width in widths.items()}
        leaves["attn/qkv_bias"] = Leaf(biases, _bias)
    if c.o_bias:
        leaves["attn/o_bias"] = Leaf({"self_attn.o_proj.bias": (embed,)}, _bias)
    if c.qk_norm:
        for name in ("q_norm", "k_norm"):
            leaves[f"attn/{name}/scale"] = Leaf({f"self_attn.{name}.weight": (c.head_dim,)}, _scale)
    if c.sinks:
        leaves["attn/sinks"] = Leaf({"self_attn.sinks": (c.num_heads,)}, _scale)
    return leaves


def _feed_forward(c: ModelConfig) -> dict[str, Leaf]:
    embed, inner = c.hidden_size, c.intermediate_size
    gate_up = {"mlp.gate_proj.weight": (inner, embed), "mlp.up_proj.weight": (inner, embed)}
    return {
        "mlp/gate_up": Leaf(gate_up, _side_by_side),
        "mlp/down": Leaf({"mlp.down_proj.weight": (embed, inner)}, _side_by_side),
    }


def _experts(moe: MoEConfig, embed: int, names: set[str]) -> dict[str, Leaf]:
    if moe.biases:
        return _gpt_oss_experts(moe, embed, names)
    count, inner = moe.num_experts, moe.intermediate_size
    leaves = {"mlp/router": Leaf({"mlp.gate.weight": (count, embed)}, _side_by_side)}
    gate_up: dict[str, Shape]
    down: dict[str, Shape]
    builds: tuple[Build, Build] = (_stacked, _stacked)
    if any(name.endswith("experts.gate_up_proj") for name in names):  # transformers 5, in memory
        gate_up = {"mlp.experts.gate_up_proj": (count, 2 * inner, embed)}
        down = {"mlp.experts.down_proj": (count, embed, inner)}
    elif any(name.endswith("experts.gate_proj.weight") for name in names):  # GGUF
        gate_up = {f"mlp.experts.{half}_proj.weight": (count, inner, embed) for half in HALVES}
        down = {"mlp.experts.down_proj.weight": (count, embed, inner)}
    else:
        experts = [f"mlp.experts.{i}" for i in range(count)]
        gate_up = {f"{e}.{half}_proj.weight": (inner, embed) for e in experts for half in HALVES}
        down = {f"{e}.down_proj.weight": (embed, inner) for e in experts}
        builds = (_each(_side_by_side, 2), _each(_side_by_side, 1))
    return leaves | {"mlp/gate_up": Leaf(gate_up, builds[0]), "mlp/down": Leaf(down, builds[1])}


def _gpt_oss_experts(moe: MoEConfig, embed: int, names: set[str]) -> dict[str, Leaf]:
    """Gate and up interleaved, stored (in, out); or as MXFP4, stored (out, in)."""
    count, inner = moe.num_experts, moe.intermediate_size
    leaves = {
        "mlp/router": Leaf({"mlp.router.weight": (count, embed)}, _side_by_side),
        "mlp/router_bias": Leaf({"mlp.router.bias": (count,)}, _bias),
    }
    if any(name.endswith("experts.gate_proj.weight") for name in names):  # GGUF
        halves = [f"mlp.experts.{half}_proj" for half in HALVES]
        down = "mlp.experts.down_proj"
        return leaves | {
            "mlp/gate_up": Leaf({f"{n}.weight": (count, inner, embed) for n in halves}, _stacked),
            "mlp/gate_up_bias": Leaf({f"{n}.bias": (count, inner) for n in halves}, _bias),
            "mlp/down": Leaf({f"{down}.weight": (count, embed, inner)}, _stacked),
            "mlp/down_bias": Leaf({f"{down}.bias": (count, embed)}, _bias),
        }
    for name, inputs, outputs in (("gate_up", embed, 2 * inner), ("down", inner, embed)):
        stored, interleaved = f"mlp.experts.{name}_proj", name == "gate_up"
        bias = {f"{stored}_bias": (count, outputs)}
        leaves[f"mlp/{name}_bias"] = Leaf(bias, _uninterleaved(_bias, interleaved, axis=1))
        if not any(found.endswith(f"{name}_proj_blocks") for found in names):
            matrices = {stored: (count, inputs, outputs)}
            leaves[f"mlp/{name}"] = Leaf(matrices, _uninterleaved(_as_stored, interleaved, axis=2))
            continue
        scales: dict[str, Shape] = {f"{stored}_scales": (count, outputs, inputs // BLOCK)}
        blocks: dict[str, Shape] = {
            f"{stored}_blocks": (count, outputs, inputs // BLOCK, BLOCK // 2)
        }
        if moe.packed:
            raw = _uninterleaved(_bytes, interleaved, axis=1)
            leaves[f"mlp/{name}_blocks"] = Leaf(blocks, raw, packed=True)
            leaves[f"mlp/{name}_scales"] = Leaf(scales, raw, packed=True)
        else:
            build = _uninterleaved(_from_mxfp4, interleaved, axis=2)
            leaves[f"mlp/{name}"] = Leaf(blocks | scales, build, packed=True)
    return leaves


def _as_stored(tensors: Sequence[Tensor], dtype: Any) -> np.ndarray:
    return cast(tensors[0], dtype)


def _scale(tensors: Sequence[Tensor], dtype: Any) -> np.ndarray:
    """Norms and sinks are float32 whatever the model's dtype."""
    return tensors[0].read().astype(np.float32)


def _bias(tensors: Sequence[Tensor], dtype: Any) -> np.ndarray:
    return np.concatenate([cast(tensor, dtype) for tensor in tensors], axis=-1)


def _bytes(tensors: Sequence[Tensor], dtype: Any) -> np.ndarray:
    return tensors[0].read()


def _side_by_side(tensors: Sequence[Tensor], dtype: Any) -> np.ndarray:
    """(out, in) matrices as one (in, out) matrix."""
    leaf = np.empty((tensors[0].shape[1], sum(tensor.shape[0] for tensor in tensors)), dtype)
    start = 0
    for tensor in tensors:
        stop = start + tensor.shape[0]
        leaf[:, start:stop] = cast(tensor, dtype).T
        start = stop
    return leaf


def _stacked(tensors: Sequence[Tensor], dtype: Any) -> np.ndarray:
    """The same of stacks of matrices, [X, out, in]."""
    parts = [cast(tensor, dtype).swapaxes(1, 2) for tensor in tensors]
    return np.concatenate(parts, axis=2)


def _each(build: Build, tensors_each: int) -> Build:
    """One such leaf an expert, stacked."""

    def stack(tensors: Sequence[Tensor], dtype: Any) -> np.ndarray:
        starts = range(0, len(tensors), tensors_each)
        first = build(tensors[:tensors_each], dtype)
        leaf = np.empty((len(starts), *first.shape), dtype)
        for i, start in enumerate(starts):
            leaf[i] = first if i == 0 else build(tensors[start : start + tensors_each], dtype)
        return leaf

    return stack


def _uninterleaved(build: Build, interleaved: bool, axis: int) -> Build:
    """gate, up, gate, up, ... of an axis as gate, gate, ..., up, up, ..."""

    def take_apart(tensors: Sequence[Tensor], dtype: Any) -> np.ndarray:
        leaf = build(tensors, dtype)
        if not interleaved:
            return leaf
        order = np.arange(leaf.shape[axis]).reshape(-1, 2).T.reshape(-1)
        return leaf.take(order, axis)

    return take_apart


def _from_mxfp4(tensors: Sequence[Tensor], dtype: Any) -> np.ndarray:
    """`pallas_kernels.grouped.mxfp4.dequantize` on the host, expert by expert."""
    blocks, scales = (tensor.read() for tensor in tensors)
    count, outputs, groups = scales.shape
    values = np.array(VALUES, np.float32)
    leaf = np.empty((count, groups * BLOCK, outputs), dtype)
    for i in range(count):
        codes = np.stack([blocks[i] & 15, blocks[i] >> 4], axis=-1).reshape(outputs, groups, BLOCK)
        factors = np.ldexp(np.float32(1), scales[i].astype(np.int32) - BIAS)
        leaf[i] = (values[codes] * factors[:, :, None]).reshape(outputs, -1).T.astype(dtype)
    return leaf


def cast(tensor: Tensor, dtype: Any) -> np.ndarray:
    """Reads a tensor as `dtype`; CheckpointError for what float16 cannot hold."""
    array = tensor.read()
    if dtype == np.float16 and array.dtype != np.float16:
        largest = max(float(array.max()), -float(array.min()))
        limit = float(np.finfo(np.float16).max)
        if largest > limit:
            raise CheckpointError(
                f"{tensor.name} has a value of magnitude {largest:g}, beyond float16's {limit:g}; "
                "load it in bfloat16 or float32"
            )
    return array.astype(dtype, copy=False)
