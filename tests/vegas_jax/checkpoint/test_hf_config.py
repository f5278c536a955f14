import json
from pathlib import Path

import pytest

from vegas_jax.checkpoint import read_config
from vegas_jax.checkpoint.hf_config import config_of
from vegas_jax.checkpoint.json_fields import Fields
from vegas_jax.errors import CheckpointError
from vegas_jax.model.config import ModelConfig

GOLDENS = Path(__file__).parents[2] / "goldens"

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "eos_token_id": 3,
}
VERSION_4 = {**SHAPE, "rope_theta": 5e5, "rope_scaling": None, "torch_dtype": "bfloat16"}
VERSION_5 = {
    **SHAPE,
    "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
    "dtype": "bfloat16",
    "layer_types": ["full_attention"] * 2,
    "sliding_window": None,
}
EXPECTED = ModelConfig(
    vocab_size=40,
    hidden_size=24,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
    tie_word_embeddings=True,
    max_position_embeddings=512,
    eos_token_ids=(3,),
)


def read(folder, config, generation=None):
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_config(folder)


def without(key):
    return {k: v for k, v in VERSION_4.items() if k != key}


@pytest.mark.parametrize("config", [VERSION_4, VERSION_5])
def test_both_styles(tmp_path, config):
    assert read(tmp_path, config) == EXPECTED


def test_rope_theta_next_to_version_4_rope_scaling(tmp_path):
    config = VERSION_4 | {"rope_scaling": {"type": "default"}}
    assert read(tmp_path, config) == EXPECTED


def test_absent_keys_default_as_in_transformers(tmp_path):
    absent = {"head_dim", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings"}
    config = read(tmp_path, {k: v for k, v in VERSION_4.items() if k not in absent})
    assert config.head_dim == 128
    assert config.rms_norm_eps == 1e-6
    assert not config.tie_word_embeddings
    assert config.max_position_embeddings == 32768


def test_null_num_key_value_heads_means_one_per_query_head(tmp_path):
    assert read(tmp_path, VERSION_4 | {"num_key_value_heads": None}).num_kv_heads == 4


@pytest.mark.parametrize(
    ("ours", "generation", "union"),
    [
        (3, None, (3,)),
        (3, {}, (3,)),
        (3, {"eos_token_id": [7, 3, 5]}, (3, 5, 7)),
        ([9, 2], {"eos_token_id": 4}, (2, 4, 9)),
        (None, {"eos_token_id": 4}, (4,)),
        (None, {"eos_token_id": None}, ()),
        ([39, 40, -1], None, (39,)),
    ],
)
def test_eos_is_the_union_of_both_files(tmp_path, ours, generation, union):
    config = read(tmp_path, VERSION_4 | {"eos_token_id": ours}, generation)
    assert config.eos_token_ids == union


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BloomForCausalLM"], "model_type": "bloom"}, "BloomForCausalLM.*Qwen3"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM.*qwen3.*Qwen3"),
        ({"architectures": None, "model_type": "gemma3"}, "gemma3.*Qwen3ForCausalLM"),
        ({"architectures": None, "model_type": None}, "Qwen3ForCausalLM"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            r"rope_scaling: rope_type.*dyn",
        ),
        ({"rope_scaling": {"type": "longrope"}}, r"rope_scaling: type.*longrope"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling lacks the key factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, r"rope_scaling: factor.*0\.5"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "truncate": 1}}, "truncate"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8}},
            "lacks the key low_freq_factor",
        ),
        ({"rope_scaling": "yarn"}, "rope_scaling"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"use_sliding_window": True}, "use_sliding_window is true"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size"),
        ({"vocab_size": "40"}, "vocab_size"),
        ({"hidden_size": 24.0}, "hidden_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"head_dim": None}, "head_dim"),
        ({"head_dim": 7}, "head_dim"),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"architectures": 5}, "architectures is 5"),
        ({"architectures": "Qwen3ForCausalLM"}, "a list of names"),
        ({"layer_types": 5}, "layer_types is 5"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, but must be at least 1"),
        (
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 0}},
            "original_max_position_embeddings is 0, but must be at least 1",
        ),
        # What would take all memory before anything else noticed.
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, .* at most 10000"),
        ({"hidden_size": 10**30}, "hidden_size.*at most"),
        ({"vocab_size": 10**400}, r"vocab_size is 10{199}\.\.\., but must be at most"),
        ({"eos_token_id": [1, None]}, "eos_token_id"),
    ],
)
def test_refuses_what_it_would_compute_wrongly(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=rf"config\.json.*{message}"):
        read(tmp_path, VERSION_4 | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**30}, "num_hidden_layers.*at most"),
        ({"num_local_experts": 10**9}, "num_local_experts.*at most"),
        ({"layer_types": [[1]]}, "layer_types"),
    ],
)
def test_refuses_the_same_of_mixtures(tmp_path, changes, message):
    gpt_oss = json.loads((GOLDENS / "gpt-oss" / "config.json").read_text())
    with pytest.raises(CheckpointError, match=rf"config\.json.*{message}"):
        read(tmp_path, gpt_oss | changes)


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "rope_theta",
    ],
)
def test_names_a_missing_key(tmp_path, key):
    with pytest.raises(CheckpointError, match=f"lacks the key {key}"):
        read(tmp_path, without(key))


def test_model_type_alone_is_enough(tmp_path):
    assert read(tmp_path, without("architectures")) == EXPECTED
    assert read(tmp_path, without("model_type")) == EXPECTED


ODD = [None, True, -1, 0, 2.5, float("nan"), float("inf"), 10**9, 10**30, "", "x", [], [[1]]]
ODD += [[None], {}, {"a": 1}, {"rope_type": [1]}, {"type": None, "factor": "x"}]
ODD += [{"quant_method": 5}, {"quant_method": ["fp8"]}]
OPTIONAL = ["rope_scaling", "rope_parameters", "quantization_config", "layer_types"]
OPTIONAL += ["sliding_window", "head_dim", "mlp_only_layers", "decoder_sparse_step", "swiglu_limit"]


@pytest.mark.parametrize("path", sorted(GOLDENS.glob("*/config.json")), ids=lambda p: p.parent.name)
def test_an_odd_value_anywhere_is_read_or_refused_in_a_sentence(path):
    sentences = []
    config = json.loads(path.read_text())
    inner = [
        (key, name) for key, value in config.items() if isinstance(value, dict) for name in value
    ]
    for key, *names in [*((key,) for key in [*config, *OPTIONAL]), *inner]:
        for odd in ODD:
            value = config[key] | {names[0]: odd} if names else odd
            fields = Fields(config | {key: value}, path)
            try:
                config_of(fields)
            except CheckpointError as error:
                sentences.append(str(error))
    assert sentences
    assert not [text for text in sentences if "\n" in text]


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"a": \xff}'])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_malformed_json_is_named(tmp_path, name, text):
    (tmp_path / "config.json").write_text(json.dumps(VERSION_4))
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=name):
        read_config(tmp_path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        read_config(tmp_path)
