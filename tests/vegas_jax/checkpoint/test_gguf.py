"""GGUF files: their tensors by the hub's names, and what is refused."""

import json
import sys

import gguf
import numpy as np
import pytest
import safetensors.numpy
from gguf import GGMLQuantizationType as Kind

from tests.vegas_jax.checkpoint.gguf_files import (
    ARCHITECTURES,
    EXPERTS,
    HEADS,
    HIDDEN,
    INNER,
    QUERIES,
    VOCABULARY,
    gguf_name,
    hub_tensors,
    interleaved,
    refused,
    stored,
    write,
)
from vegas_jax.checkpoint import read_config, resolve
from vegas_jax.checkpoint.gguf import open_gguf


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tensors_are_the_hubs(path, architecture):
    expected = hub_tensors(architecture)
    tensors = open_gguf(write(path, architecture)).tensors
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.name == gguf_name(architecture, name)
        assert tensor.dtype == "F32"
        assert tensor.shape == expected[name].shape
        np.testing.assert_array_equal(tensor.read(), expected[name], strict=True)


def test_float16_is_read_as_stored(path):
    matrix = hub_tensors("llama")["layers.1.self_attn.q_proj.weight"].astype(np.float16)
    write(path, "llama", {"blk.1.attn_q.weight": interleaved(matrix, HEADS)})
    tensor = open_gguf(path).tensors["layers.1.self_attn.q_proj.weight"]
    assert tensor.dtype == "F16"
    np.testing.assert_array_equal(tensor.read(), matrix, strict=True)


def blocks(rows, kind, seed=3):
    """Random quantised rows of 32 values, a block each: their bytes, and the values they mean."""
    rng = np.random.default_rng(seed)
    scales = rng.standard_normal(rows).astype(np.float16)
    if kind == Kind.Q8_0:
        integers = rng.integers(-128, 128, (rows, HIDDEN), np.int8)
        packed = integers.view(np.uint8)
    else:
        integers = rng.integers(-8, 8, (rows, HIDDEN))
        nibbles = (integers + 8).astype(np.uint8)
        packed = nibbles[:, :16] | nibbles[:, 16:] << 4
    data = np.concatenate([scales.view(np.uint8).reshape(rows, 2), packed], axis=1)
    return data, scales.astype(np.float32)[:, None] * integers.astype(np.float32)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_quantised(path, kind, architecture):
    data, values = blocks(QUERIES, kind)
    write(path, architecture, {"blk.0.attn_q.weight": (data, kind)})
    tensor = open_gguf(path).tensors["layers.0.self_attn.q_proj.weight"]
    assert (tensor.dtype, tensor.shape) == (kind.name, (QUERIES, HIDDEN))
    read = tensor.read()
    assert read.dtype == np.float32
    if architecture == "llama":
        read = interleaved(read, HEADS)
    np.testing.assert_array_equal(read, values)


def test_quantised_experts(path):
    data, values = blocks(EXPERTS * INNER, Kind.Q8_0)
    data = data.reshape(EXPERTS, INNER, -1)
    write(path, "gpt-oss", {"blk.1.ffn_up_exps.weight": (data, Kind.Q8_0)})
    tensor = open_gguf(path).tensors["layers.1.mlp.experts.up_proj.weight"]
    assert tensor.shape == (EXPERTS, INNER, HIDDEN)
    np.testing.assert_array_equal(tensor.read(), values.reshape(tensor.shape))


def test_mxfp4(path):
    """A byte of exponent, then sixteen bytes: first sixteen values low, the others high."""
    codes = np.random.default_rng(0).integers(0, 16, (EXPERTS * INNER, HIDDEN), np.uint8)
    packed = codes[:, :16] | codes[:, 16:] << 4
    exponents = np.arange(EXPERTS * INNER, dtype=np.uint8)[:, None] % 20 + 120
    data = np.concatenate([exponents, packed], axis=1).reshape(EXPERTS, INNER, 17)
    write(path, "gpt-oss", {"blk.0.ffn_gate_exps.weight": (data, Kind.MXFP4)})
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.concatenate([magnitudes, -magnitudes])[codes] * 2.0 ** (exponents - 127.0)
    read = open_gguf(path).tensors["layers.0.mlp.experts.gate_proj.weight"].read()
    np.testing.assert_array_equal(read, values.reshape(EXPERTS, INNER, HIDDEN))


def test_shipped_checkpoint(path, tmp_path):
    """The shipped model, put into GGUF and back, is what its own folder says."""
    folder = resolve("codelm-16m")
    config, shipped = read_config(folder), {}
    for file in sorted(folder.glob("*.safetensors")):
        shipped |= safetensors.numpy.load_file(file)
    shipped = {name.removeprefix("model."): tensor for name, tensor in shipped.items()}
    settings = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_theta,
    }
    absent = dict.fromkeys(stored("qwen3", hub_tensors("qwen3")), (None, None))
    vocabulary = VOCABULARY | {"tokens": None, "token_type": None, "model": None}
    vocabulary |= {"bos_token_id": None, "eos_token_id": config.eos_token_ids[0]}
    float16 = {gguf_name("qwen3", k): v.astype(np.float16) for k, v in shipped.items()}
    opened = open_gguf(write(path, "qwen3", absent | float16, settings, vocabulary))
    assert opened.tokenizer is None
    assert opened.tensors.keys() == shipped.keys()
    for name, tensor in opened.tensors.items():
        np.testing.assert_array_equal(tensor.read(), shipped[name].astype(np.float16))
    raw = opened.config | {"eos_token_id": list(config.eos_token_ids)}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_config(tmp_path) == config


def test_without_the_package(path, monkeypatch):
    write(path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(path, "pip install vegas_jax[gguf]")


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 zip", b'{"a": 1}'])
def test_no_gguf(path, content):
    path.write_bytes(content)
    refused(path, repr(content[:4]), "GGUF")


def test_missing_file_and_folder(path, tmp_path):
    refused(path, "No such file")
    refused(tmp_path, "Is a directory")


@pytest.mark.parametrize("version", [1, 4, 0x03000000])
def test_other_version(path, version):
    data = bytearray(write(path).read_bytes())
    data[4:8] = version.to_bytes(4, "little")
    path.write_bytes(data)
    refused(path)


def test_truncated_anywhere(path):
    data = write(path).read_bytes()
    for length in np.linspace(4, len(data) - 40, 60).astype(int):
        path.write_bytes(data[:length])
        refused(path, "truncated")


def test_a_list_longer_than_the_file(path):
    data = bytearray(write(path).read_bytes())
    key = b"tokenizer.ggml.token_type"
    at = data.index(key) + len(key) + 2 * 4  # its type and that of its values
    data[at : at + 8] = (2**56).to_bytes(8, "little")
    path.write_bytes(data)
    refused(path, "truncated", f"{len(data)} bytes")


def test_part_of_a_model(path):
    refused(write(path, **{"split.count": 3}), "3 parts")


def test_unknown_quantisation(path):
    write(path)
    data = path.read_bytes()
    name = b"blk.0.attn_q.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    path.write_bytes(data[:at] + (99).to_bytes(4, "little") + data[at + 4 :])
    refused(path, "quantisation 99")


def test_integers_are_no_weights(path):
    write(path, tensors={"blk.0.attn_q.weight": np.zeros((QUERIES, HIDDEN), np.int8)})
    refused(path, "blk.0.attn_q.weight", "quantisation I8")


def test_unknown_architecture(path):
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(path, "general.architecture", "'gemma3'")


def test_unknown_tensor(path):
    matrix = np.zeros((1, HIDDEN), np.float32)
    refused(write(path, tensors={"blk.0.attn_qkv.weight": matrix}), "blk.0.attn_qkv.weight")


def test_without_an_embedding(path):
    refused(write(path, tensors={"token_embd.weight": (None, None)}), "token_embd.weight")
