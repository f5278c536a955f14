"""Tiny GGUF files of every architecture, written with the package gguf."""

import functools

import gguf
import numpy as np
import pytest

from vegas_jax.checkpoint.gguf import open_gguf
from vegas_jax.errors import CheckpointError

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, EXPERTS, VOCAB = 2, 32, 4, 2, 16, 64, 3, 8
QUERIES, KEYS = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
ARCHITECTURES = ["llama", "qwen2", "qwen3", "qwen3moe", "gpt-oss"]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

ATTENTION = {
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
    "self_attn.q_proj.weight": (QUERIES, HIDDEN),
    "self_attn.k_proj.weight": (KEYS, HIDDEN),
    "self_attn.v_proj.weight": (KEYS, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, QUERIES),
}
QKV_BIASES = {
    "self_attn.q_proj.bias": (QUERIES,),
    "self_attn.k_proj.bias": (KEYS,),
    "self_attn.v_proj.bias": (KEYS,),
}
HEAD_NORMS = {"self_attn.q_norm.weight": (HEAD_DIM,), "self_attn.k_norm.weight": (HEAD_DIM,)}
DENSE = {
    "mlp.gate_proj.weight": (INNER, HIDDEN),
    "mlp.up_proj.weight": (INNER, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INNER),
}
SPARSE = {
    "mlp.experts.gate_proj.weight": (EXPERTS, INNER, HIDDEN),
    "mlp.experts.up_proj.weight": (EXPERTS, INNER, HIDDEN),
    "mlp.experts.down_proj.weight": (EXPERTS, HIDDEN, INNER),
}
HUB_LAYERS = {
    "llama": ATTENTION | DENSE,
    "qwen2": ATTENTION | QKV_BIASES | DENSE,
    "qwen3": ATTENTION | HEAD_NORMS | DENSE,
    "qwen3moe": ATTENTION | HEAD_NORMS | SPARSE | {"mlp.gate.weight": (EXPERTS, HIDDEN)},
    "gpt-oss": ATTENTION
    | QKV_BIASES
    | SPARSE
    | {
        "self_attn.o_proj.bias": (HIDDEN,),
        "self_attn.sinks": (HEADS,),
        "mlp.router.weight": (EXPERTS, HIDDEN),
        "mlp.router.bias": (EXPERTS,),
        "mlp.experts.gate_proj.bias": (EXPERTS, INNER),
        "mlp.experts.up_proj.bias": (EXPERTS, INNER),
        "mlp.experts.down_proj.bias": (EXPERTS, HIDDEN),
    },
}

SETTINGS = {
    "block_count": LAYERS,
    "context_length": 4096,
    "embedding_length": HIDDEN,
    "feed_forward_length": INNER,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": HEAD_DIM,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 1000000.0,
}
MORE_SETTINGS = {
    "qwen3moe": {"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 24},
    "gpt-oss": {
        "expert_count": 3,
        "expert_used_count": 2,
        "expert_feed_forward_length": INNER,
        "attention.sliding_window": 128,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
    },
}
VOCABULARY = {
    "model": "gpt2",
    "pre": "qwen2",
    "tokens": ["a", "b", "ab", "c", "<s>", "</s>", "<|eot_id|>", "<pad>"],
    "token_type": [NORMAL] * 4 + [CONTROL] * 3 + [UNUSED],
    "merges": ["a b"],
    "bos_token_id": 4,
    "eos_token_id": 5,
}


def hub_tensors(architecture, tied=False):
    shapes = {"embed_tokens.weight": (VOCAB, HIDDEN), "norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for i in range(LAYERS):
        shapes |= {f"layers.{i}.{name}": s for name, s in HUB_LAYERS[architecture].items()}
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}


@functools.cache
def name_map(architecture):
    """The package's own table, which llama.cpp's conversion uses."""
    arch = next(a for a, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)
    return gguf.get_tensor_name_map(arch, 8)


def gguf_name(architecture, name):
    full = name if name.startswith("lm_head") else f"model.{name}"
    found = name_map(architecture).get_name(full, try_suffixes=(".weight", ".bias"))
    return f"{found}.weight" if name.endswith("sinks") else found


def interleaved(matrix, heads):
    """Row by row: pair i of a head is rows i and i + half there, rows 2 i and 2 i + 1 in GGUF."""
    rows, half = np.empty_like(matrix), len(matrix) // heads // 2
    for head in range(heads):
        first = head * 2 * half
        for i in range(half):
            rows[first + 2 * i] = matrix[first + i]
            rows[first + 2 * i + 1] = matrix[first + half + i]
    return rows


def stored(architecture, tensors):
    """The hub's tensors as llama.cpp stores them."""
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS} if architecture == "llama" else {}
    result = {}
    for name, tensor in tensors.items():
        count = heads.get(name.split(".")[-2])
        result[gguf_name(architecture, name)] = interleaved(tensor, count) if count else tensor
    return result


def write(path, architecture="qwen3", tensors=None, settings=None, vocabulary=VOCABULARY, **keys):
    """A file; `None` takes a key or a tensor out, and a tensor may be (bytes, kind)."""
    writer = gguf.GGUFWriter(path, architecture)
    settings = SETTINGS | MORE_SETTINGS.get(architecture, {}) | (settings or {})
    pairs = {f"{architecture}.{key}": value for key, value in settings.items()}
    pairs |= {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()} | keys
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in pairs.items():
        if value is not None:
            add[type(value)](key, value)
    every = stored(architecture, hub_tensors(architecture)) | (tensors or {})
    for name, tensor in every.items():
        data, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        if data is not None:
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refused(path, *parts):
    """Opening the file must raise one sentence that names it and has all parts."""
    with pytest.raises(CheckpointError) as error:
        open_gguf(path)
    message = str(error.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    for part in parts:
        assert part in message
