"""The metadata of GGUF files as a config.json."""

import json

import numpy as np
import pytest

from tests.vegas_jax.checkpoint.gguf_files import (
    ARCHITECTURES,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    QUERIES,
    VOCAB,
    VOCABULARY,
    interleaved,
    refused,
    write,
)
from vegas_jax.checkpoint.gguf import open_gguf


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


COMMON = {
    "hidden_act": "silu",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 4,
    "eos_token_id": [5, 6],
}
CONFIGS = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": False,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "use_sliding_window": False,
    },
    "qwen3moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "use_sliding_window": False,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "experts_per_token": 2,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"],
        "swiglu_limit": 7.0,
        "initial_context_length": 4096,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_config(path, architecture):
    config = open_gguf(write(path, architecture)).config
    assert config == COMMON | CONFIGS[architecture]
    json.dumps(config)


def test_config_without_what_may_be_absent(path):
    keys = dict.fromkeys(
        ["attention.head_count_kv", "attention.key_length", "rope.freq_base"], None
    )
    keys |= {"embedding_length": HEADS * HEAD_DIM}
    vocabulary = VOCABULARY | {"bos_token_id": None, "eos_token_id": None}
    write(path, "qwen3", {"output.weight": (None, None)}, keys, vocabulary)
    config = open_gguf(path).config
    assert config["tie_word_embeddings"] is True
    assert config["num_key_value_heads"] == HEADS
    assert config["head_dim"] == HEAD_DIM
    assert config["rope_theta"] == 10000.0
    assert config["bos_token_id"] is None
    assert config["eos_token_id"] == [6]


def test_ends_named_by_the_file(path):
    write(path, vocabulary=VOCABULARY | {"eot_token_id": 3, "eom_token_id": 2})
    assert open_gguf(path).config["eos_token_id"] == [2, 3, 5, 6]


def test_biases_of_llama(path):
    bias = np.arange(QUERIES, dtype=np.float32)
    write(
        path,
        "llama",
        {"blk.0.attn_q.bias": interleaved(bias, HEADS), "blk.0.ffn_gate.bias": bias[:INNER]},
    )
    opened = open_gguf(path)
    assert opened.config["attention_bias"] is True
    assert opened.config["mlp_bias"] is True
    np.testing.assert_array_equal(opened.tensors["layers.0.self_attn.q_proj.bias"].read(), bias)


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"type": "none"}, None),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 32768},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        ),
        (
            {
                "type": "yarn",
                "factor": 4.0,
                "original_context_length": 64,
                "yarn_beta_fast": 24.0,
                "finetuned": True,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 24.0,
            },
        ),
    ],
)
def test_rope_scaling(path, keys, scaling):
    write(path, settings={f"rope.scaling.{key}": value for key, value in keys.items()})
    assert open_gguf(path).config.get("rope_scaling") == scaling


def llama3_factors(factor, theta=500000.0, head_dim=HEAD_DIM):
    """As Meta's code has it: by wavelengths, in between smoothly."""
    result = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        smooth = (8192 / wavelength - 1) / (4 - 1)
        if wavelength < 8192 / 4:
            result.append(1.0)
        elif wavelength > 8192 / 1:
            result.append(factor)
        else:
            result.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(result, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rope_scaling_of_llama_3(path, factor):
    factors = llama3_factors(factor, head_dim=QUERIES)
    assert ((factors > 1) & (factors < factor)).any()
    one_head = {"attention.head_count": 1, "attention.head_count_kv": 1, "rope.freq_base": 5e5}
    tensors = {
        f"blk.{i}.attn_k.weight": np.zeros((QUERIES, HIDDEN), np.float32) for i in range(LAYERS)
    }
    tensors |= {"rope_freqs.weight": factors}
    write(path, "llama", tensors, one_head | {"attention.key_length": QUERIES})
    opened = open_gguf(path)
    assert "rope_freqs.weight" not in opened.tensors
    assert opened.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_rope_factors_of_one_are_no_scaling(path):
    write(path, "llama", {"rope_freqs.weight": np.ones(HEAD_DIM // 2, np.float32)})
    assert "rope_scaling" not in open_gguf(path).config


@pytest.mark.parametrize(
    ("architecture", "settings", "parts"),
    [
        ("qwen3", {"rope.scaling.type": "longrope"}, ["qwen3.rope.scaling.type", "'longrope'"]),
        ("qwen3", {"rope.scaling.type": "yarn"}, ["lacks", "qwen3.rope.scaling.factor"]),
        ("qwen3", {"rope.scaling.yarn_ext_factor": 0.5}, ["yarn_ext_factor", "0.5"]),
        ("qwen3", {"rope.dimension_count": 8}, ["qwen3.rope.dimension_count", "8", "16"]),
        ("qwen3", {"attention.value_length": 8}, ["qwen3.attention.value_length", "8", "16"]),
        ("qwen3", {"attention.sliding_window": 64}, ["qwen3.attention.sliding_window", "64"]),
        ("qwen3", {"block_count": None}, ["lacks", "qwen3.block_count"]),
        ("qwen3", {"block_count": 0}, ["qwen3.block_count", "0"]),
        ("qwen3", {"attention.head_count_kv": [2, 1]}, ["head_count_kv", "[2, 1]"]),
        ("qwen3", {"attention.layer_norm_rms_epsilon": -1.0}, ["rms_epsilon", "-1.0"]),
        ("llama", {"expert_count": 8}, ["llama.expert_count", "8"]),
        ("llama", {"attention.head_count": 2}, ["blk.0.attn_q.weight", "2 heads"]),
    ],
)
def test_settings_that_are_refused(path, architecture, settings, parts):
    refused(write(path, architecture, settings=settings), *parts)


@pytest.mark.parametrize(
    ("factors", "settings"),
    [
        (np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32), {}),
        (llama3_factors(8.0, 1e6), {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}),
    ],
)
def test_other_rope_factors(path, factors, settings):
    write(path, "llama", {"rope_freqs.weight": factors}, settings)
    refused(path, "rope_freqs.weight", "at most 8")
