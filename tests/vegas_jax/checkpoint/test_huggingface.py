"""Tiny checkpoints of every kind, written with safetensors and read back."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from vegas_jax.checkpoint import read_config, read_params, resolve
from vegas_jax.checkpoint.hf_config import read_fp8_block
from vegas_jax.errors import CheckpointError, InputError
from vegas_jax.model.config import ModelConfig

GOLDENS = Path(__file__).parents[2] / "goldens"
EMBEDDING = "model.embed_tokens.weight"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
TIED = ModelConfig(
    vocab_size=11,
    hidden_size=6,
    intermediate_size=10,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,  # num_heads * head_dim is not hidden_size
    tie_word_embeddings=True,
)
UNTIED = ModelConfig(**{**vars(TIED), "tie_word_embeddings": False})


def stored(config, dtype=np.float32):
    """Random tensors under their Hugging Face names."""
    e, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    shapes = {EMBEDDING: (config.vocab_size, e), "model.norm.weight": (e,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, e)
    for i in range(config.num_layers):
        for name, shape in {
            "input_layernorm": (e,),
            "self_attn.q_proj": (config.num_heads * d, e),
            "self_attn.k_proj": (config.num_kv_heads * d, e),
            "self_attn.v_proj": (config.num_kv_heads * d, e),
            "self_attn.q_norm": (d,),
            "self_attn.k_norm": (d,),
            "self_attn.o_proj": (e, config.num_heads * d),
            "post_attention_layernorm": (e,),
            "mlp.gate_proj": (f, e),
            "mlp.up_proj": (f, e),
            "mlp.down_proj": (e, f),
        }.items():
            shapes[f"model.layers.{i}.{name}.weight"] = shape
    rng = np.random.default_rng(0)
    return {k: rng.standard_normal(shape).astype(dtype) for k, shape in shapes.items()}


def save(folder, tensors):
    save_file(tensors, folder / "model.safetensors")
    return folder


def save_shards(folder, tensors, num_shards=3, index=True):
    names = [f"model-{i + 1:05}-of-{num_shards:05}.safetensors" for i in range(num_shards)]
    weight_map = {key: names[i % num_shards] for i, key in enumerate(tensors)}
    for name in names:
        save_file({k: tensors[k] for k in tensors if weight_map[k] == name}, folder / name)
    if index:
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)
    return folder


def without_prefix(tensors):
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


def assert_reads(params, tensors, config):
    """Every leaf, by the definition of the tree."""

    def t(name):
        return tensors[f"model.{name}.weight"].astype(np.float32).T

    layers = {}
    for i in range(config.num_layers):
        at = f"layers.{i}"
        attn = [t(f"{at}.self_attn.{x}_proj") for x in "qkv"]
        layers[f"layers_{i}"] = {
            "input_norm": {"scale": t(f"{at}.input_layernorm")},
            "attn": {
                "qkv": np.concatenate(attn, 1),
                "q_norm": {"scale": t(f"{at}.self_attn.q_norm")},
                "k_norm": {"scale": t(f"{at}.self_attn.k_norm")},
                "o": t(f"{at}.self_attn.o_proj"),
            },
            "post_norm": {"scale": t(f"{at}.post_attention_layernorm")},
            "mlp": {
                "gate_up": np.concatenate([t(f"{at}.mlp.gate_proj"), t(f"{at}.mlp.up_proj")], 1),
                "down": t(f"{at}.mlp.down_proj"),
            },
        }
    expected = {
        "embed": t("embed_tokens").T,
        **layers,
        "final_norm": {"scale": t("norm")},
    }
    if not config.tie_word_embeddings:
        expected["head"] = tensors["lm_head.weight"].astype(np.float32).T
    assert_same(params, expected)


@pytest.mark.parametrize("config", [TIED, UNTIED])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_single_file(tmp_path, config, dtype):
    tensors = stored(config, dtype)
    assert_reads(read_params(save(tmp_path, tensors), config, jnp.float32), tensors, config)


def test_a_language_model_among_others(tmp_path):
    tensors = stored(UNTIED)
    prefixed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    assert_reads(read_params(save(tmp_path, prefixed), UNTIED, jnp.float32), tensors, UNTIED)


@pytest.mark.parametrize("dtype", [b"F8_E5M2", b"F8_E8M0"])
def test_scales_go_with_fp8_of_one_kind(tmp_path, dtype):
    source = GOLDENS / "qwen3-fp8"
    data = (source / "model.safetensors").read_bytes().replace(b"F8_E4M3", dtype, 1)
    (tmp_path / "model.safetensors").write_bytes(data)
    config, block = read_config(source), read_fp8_block(source)
    message = f"unexpected: .*_scale_inv; not of dtype BF16, F16, F32: .*{dtype.decode()}$"
    with pytest.raises(CheckpointError, match=message):
        read_params(tmp_path, config, jnp.float32, block)


def test_a_scale_of_a_norm_is_unexpected(tmp_path):
    tensors = stored(TIED) | {"model.norm.weight_scale_inv": np.ones((1, 1), np.float32)}
    with pytest.raises(CheckpointError, match=r"unexpected: model\.norm\.weight_scale_inv$"):
        read_params(save(tmp_path, tensors), TIED, jnp.float32, (128, 128))


@pytest.mark.parametrize("index", [True, False])
def test_shards(tmp_path, index):
    tensors = stored(UNTIED)
    folder = save_shards(tmp_path, tensors, index=index)
    assert_reads(read_params(folder, UNTIED, jnp.float32), tensors, UNTIED)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_matrices_take_the_dtype_and_scales_stay_float32(tmp_path, dtype):
    tensors = stored(UNTIED)
    params = read_params(save(tmp_path, tensors), UNTIED, dtype)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        assert isinstance(leaf, jax.Array)
        assert leaf.dtype == ("float32" if path[-1].key == "scale" else dtype)
    rounded = tensors["lm_head.weight"].T.astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(params["head"], rounded)


def test_names_without_prefix_and_rope_buffers(tmp_path):
    tensors = stored(UNTIED)
    bare = without_prefix(tensors) | {
        "layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)
    }
    assert_reads(read_params(save(tmp_path, bare), UNTIED, "float32"), tensors, UNTIED)


def test_tied_with_an_equal_head(tmp_path):
    tensors = stored(TIED)
    folder = save(tmp_path, tensors | {"lm_head.weight": tensors[EMBEDDING].copy()})
    assert_reads(read_params(folder, TIED, "float32"), tensors, TIED)


def test_tied_with_another_head_is_refused(tmp_path):
    folder = save(tmp_path, stored(UNTIED))
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings true.*lm_head\.weight differs"):
        read_params(folder, TIED, "float32")


def test_untied_without_a_head_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight$"):
        read_params(save(tmp_path, stored(TIED)), UNTIED, "float32")


def test_all_differences_are_listed(tmp_path):
    tensors = stored(TIED)
    del tensors["model.norm.weight"], tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(16, np.float32)
    tensors[Q_PROJ] = np.zeros((16, 5), np.float32)
    tensors[EMBEDDING] = tensors[EMBEDDING].astype(np.float64)
    with pytest.raises(CheckpointError) as raised:
        read_params(save(tmp_path, tensors), TIED, "float32")
    assert str(raised.value).partition("tensors ")[2] == (
        "missing: model.layers.0.mlp.up_proj.weight, model.norm.weight; "
        "unexpected: model.layers.0.self_attn.q_proj.bias; "
        f"of another shape: {Q_PROJ} [16, 5] instead of [16, 6]; "
        f"not of dtype BF16, F16, F32: {EMBEDDING} F64"
    )


def test_long_lists_are_capped(tmp_path):
    tensors = stored(TIED)
    folder = save(tmp_path, {k: v for k, v in tensors.items() if "layers.1" not in k})
    with pytest.raises(CheckpointError, match=r"weight and 1 more$"):
        read_params(folder, TIED, "float32")


def test_a_missing_tensor_is_named_as_the_others_are(tmp_path):
    tensors = without_prefix(stored(TIED))
    del tensors["norm.weight"]
    with pytest.raises(CheckpointError, match=r"missing: norm\.weight"):
        read_params(save(tmp_path, tensors), TIED, "float32")


def test_the_same_tensor_in_two_files_is_refused(tmp_path):
    tensors = stored(TIED)
    save_shards(tmp_path, tensors, index=False)
    save_file({EMBEDDING: tensors[EMBEDDING]}, tmp_path / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"twice.*embed_tokens.*more\.safetensors"):
        read_params(tmp_path, TIED, "float32")


def test_a_missing_shard_is_named(tmp_path):
    save_shards(tmp_path, stored(TIED))
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks files.*model-00002-of-00003"):
        read_params(tmp_path, TIED, "float32")


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, -1])
def test_a_truncated_shard_is_named(tmp_path, keep):
    save_shards(tmp_path, stored(TIED))
    shard = tmp_path / "model-00003-of-00003.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003.*cannot be read"):
        read_params(tmp_path, TIED, "float32")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_a_malformed_index_is_named(tmp_path, text):
    save_shards(tmp_path, stored(TIED))
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json must be"):
        read_params(tmp_path, TIED, "float32")


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [7e4, -1e30, np.inf])
def test_float16_overflow_is_named(tmp_path, dtype, value):
    tensors = stored(TIED, dtype)
    tensors[Q_PROJ][3, 2] = value
    folder = save(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=f"{Q_PROJ}.*float16"):
        read_params(folder, TIED, "float16")
    read_params(folder, TIED, "bfloat16")


@pytest.mark.parametrize("dtype", ["int8", "float64"])
def test_other_dtypes_are_refused(tmp_path, dtype):
    with pytest.raises(InputError, match=f"dtype is '{dtype}'"):
        read_params(save(tmp_path, stored(TIED)), TIED, dtype)


def test_resolve_takes_a_folder(tmp_path):
    save(tmp_path, stored(TIED))
    (tmp_path / "config.json").write_text("{}")
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path


def test_resolve_says_what_is_wrong(tmp_path):
    file = save(tmp_path, stored(TIED)) / "model.safetensors"
    empty = tmp_path / "empty"
    empty.mkdir()
    weightless = tmp_path / "weightless"
    weightless.mkdir()
    (weightless / "config.json").write_text("{}")
    for given, problem in {
        "Qwen/Qwen3-8B": "does not exist",
        "": "has no config.json",
        file: "is not a folder",
        empty: "has no config.json",
        tmp_path: "has no config.json",
        weightless: r"has no \*.safetensors",
    }.items():
        with pytest.raises(CheckpointError, match=f"{problem}.*shipped name: codelm-16m"):
            resolve(given)
    with pytest.raises(CheckpointError, match=r"'a{80}\.\.\.' cannot be looked for: File name too"):
        resolve("a" * 5000)


def test_the_shipped_checkpoint():
    folder = resolve("codelm-16m")
    config = read_config(folder)
    assert config.eos_token_ids == (0,)
    params = read_params(folder, config, "bfloat16")
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 16_063_808
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen3-untied", "qwen3-mha"])
def test_what_transformers_writes(name):
    folder = resolve(GOLDENS / name)
    config = read_config(folder)
    params = read_params(folder, config, "float32")
    assert ("head" in params) is not config.tie_word_embeddings
