"""Decodes tiny models on a mesh of virtual devices; tests/vegas_jax/test_sharding.py runs it.

    python -m tests.vegas_jax.sharded_decoding data:2,model:2

A program of its own, since how many devices a CPU has is decided when JAX starts.
"""

import dataclasses
import math
import os
import re
import sys
import tempfile
from pathlib import Path

os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vegas_jax
from tests import tiny
from vegas_jax import Generator, Processors, SamplingParams, SpecConfig, Transformer, sharding, spec
from vegas_jax.checkpoint.conversion import to_orbax
from vegas_jax.compiled import decode_jit
from vegas_jax.errors import InputError
from vegas_jax.model.config import MoEConfig

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

ROOT = Path(__file__).parents[2]
LENGTHS = (1, 17, 60, 130)
MAX_LEN = 200
DENSE = dataclasses.replace(tiny.CONFIG, num_layers=1)  # 97 tokens: no axis divides them
MOE = dataclasses.replace(
    tiny.CONFIG,
    num_layers=1,
    vocab_size=96,
    tie_word_embeddings=False,
    moe=MoEConfig(4, 2, intermediate_size=48, norm_topk_prob=True, layers=(0,)),
)
GPT_OSS = dataclasses.replace(
    MOE,
    num_layers=2,
    qk_norm=False,
    qkv_bias=True,
    o_bias=True,
    sinks=True,
    sliding_windows=(16, None),
    moe=MoEConfig(4, 2, 64, True, layers=(0, 1), biases=True, swiglu_limit=7.0, packed=True),
)
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
COUPLED = SamplingParams(max_new_tokens=24, temperature=0.8, ignore_eos=True, seed=(0, 1, 2, 3))
SPARSE = {"sparse_ratio": 0.02, "sparse_min_tokens": 8, "sparse_block_size": 8}
VEGAS = SpecConfig(acceptance="coupled", **SPARSE)
PER_HEAD = SpecConfig(per_kv_head=True, score_rows="last_accepted", **SPARSE)
PLAIN, DENSE_DRAFTS = SpecConfig(method="plain"), SpecConfig(method="dense")
STREAMING = SpecConfig(method="streaming", sparse_ratio=0.02, sparse_min_tokens=24)

CASES = {
    "data:1,model:1": (DENSE, DENSE_DRAFTS),
    "model:2": (MOE, VEGAS),
    "data:4": (DENSE, STREAMING),
    "data:2,model:2": (GPT_OSS, PER_HEAD),
}


def make_params(config):
    """tiny's weights, with biases that are not 0 and bytes that are weights."""
    rng = np.random.default_rng(5)

    def fill(path, leaf):
        name = path[-1].key
        if name.endswith("scales"):
            return rng.integers(118, 124, leaf.shape).astype(np.uint8)
        if name.endswith("blocks"):
            return rng.integers(0, 256, leaf.shape).astype(np.uint8)
        is_bias = name.endswith("bias") or name == "sinks"
        return rng.normal(0, 0.3, leaf.shape).astype(np.float32) if is_bias else leaf

    return jax.tree_util.tree_map_with_path(fill, tiny.params(config))


def compile_and_decode(config, params, how, sampling, mesh):
    """The tokens of all prompts by the pure functions, and the program as text."""
    model, sizes = Transformer(config, mesh=mesh), {"batch": len(LENGTHS), "max_len": MAX_LEN}
    params = params if mesh is None else sharding.shard_params(model, params)
    processors = Processors.of(sampling)
    prompts = np.zeros((len(LENGTHS), max(LENGTHS)), np.int32)
    for row, prompt in zip(prompts, tiny.prompts(LENGTHS, config.vocab_size), strict=True):
        row[: len(prompt)] = prompt

    def run(params, tokens, lengths):
        state = spec.init_state(model, how, sampling, **sizes)
        requests = spec.new_requests(
            config,
            how,
            sampling,
            limits=jnp.full(len(LENGTHS), sampling.max_new_tokens, jnp.int32),
            prompts=tokens,
            prompt_lengths=lengths,
            **sizes,
        )
        state = spec.prefill(model, params, state, requests, tokens, lengths, how, processors)
        requests = spec.decode(model, params, state, how, processors).requests
        return requests.tokens[:, : sampling.max_new_tokens]

    arguments = (params, jnp.asarray(prompts), jnp.asarray(LENGTHS, jnp.int32))
    program = jax.jit(run).lower(*arguments).compile()
    return np.asarray(program(*arguments)).tolist(), program.as_text()


def check_collectives(config, mesh, text):
    """Nothing large is gathered, and a layer sums twice."""
    shape = r"\w+\[([\d,]*)\]"
    sizes = {
        name: [
            max(math.prod(map(int, dims.split(","))) for dims in re.findall(shape, found) if dims)
            for found in re.findall(rf"= ([^=\n]*) {name}(?:-start)?\(", text)
            if re.findall(r"\[\d", found)
        ]
        for name in ("all-gather", "all-to-all", "collective-permute", "all-reduce")
    }
    cache = len(LENGTHS) * config.num_kv_heads * 512 * config.head_dim
    experts = config.vocab_size * config.hidden_size
    if config.moe is not None:  # in packed form half a byte a weight
        weights = config.moe.num_experts * config.hidden_size * config.moe.intermediate_size
        experts = min(experts, weights // 2)
    for name in ("all-gather", "all-to-all", "collective-permute"):
        largest = max(sizes[name], default=0)
        assert largest < min(cache, experts), f"{name} of {largest} elements"
    assert sizes["all-reduce"] or mesh.size == 1
    # Embedding, attention and feed-forward, in prefill, at the beginning, drafting and verifying.
    rows = re.findall(rf"= [^=\n]*f32\[\d+,\d+,{config.hidden_size}\][^=\n]* all-reduce\(", text)
    assert len(rows) <= 4 * (1 + 2 * config.num_layers), len(rows)


def check_generator(mesh):
    """More prompts than slots, which are as many as the data axis has devices; with noise."""
    params = tiny.params(DENSE)
    expected, _ = compile_and_decode(DENSE, params, PLAIN, COUPLED, None)
    model = Transformer(DENSE, mesh=mesh)
    generator = Generator(
        model, sharding.shard_params(model, params), spec=VEGAS, max_len=MAX_LEN, batch_size=1
    )
    completions = generator.generate(tiny.prompts(LENGTHS), COUPLED)
    assert [list(c.token_ids) for c in completions] == expected
    assert (
        0 < sum(c.stats.accepted for c in completions) < sum(c.stats.drafted for c in completions)
    )
    assert decode_jit._cache_size() == 1


def check_loading(mesh, folder):
    """Leaf by leaf what placing the loaded parameters gives, each device's part its own."""
    for name in ("qwen3-untied", "gpt-oss-mxfp4"):
        source, converted = ROOT / "tests/goldens" / name, Path(folder) / name
        _, whole, _ = vegas_jax.load(source, dtype="float32")
        to_orbax(source, converted)
        for checkpoint in (source, converted):
            model, params, _ = vegas_jax.load(checkpoint, dtype="float32", mesh=mesh)
            expected = sharding.shard_params(model, whole)
            jax.tree.map(np.testing.assert_array_equal, params, expected)
            places = jax.tree.map(lambda leaf: leaf.sharding, params)
            assert places == sharding.param_shardings(model)
            o = params["layers_0"]["attn"]["o"]
            assert o.addressable_shards[0].data.size * mesh.shape["model"] == o.size


def check_refusals():
    """One sentence each."""
    for text, config, message in (
        ("model:4", DENSE, "model axis, but must have a divisor of the model's KV heads"),
        ("data:3,model:3", DENSE, "of at most the 8 devices"),
    ):
        with pytest.raises(InputError, match=message):
            Transformer(config, mesh=sharding.parse_mesh(text))
    mesh = sharding.parse_mesh("data:2")
    with pytest.raises(InputError, match="a multiple of the mesh's data axis"):
        spec.init_state(Transformer(DENSE, mesh=mesh), PLAIN, GREEDY, batch=3, max_len=8)
    with pytest.raises(InputError, match="shard_params"):
        Generator(Transformer(DENSE, mesh=mesh), tiny.params(DENSE))
    other = jax.make_mesh((2,), ("x",))
    with pytest.raises(InputError, match="of no axes but data and model"):
        Transformer(DENSE, mesh=other)
    # Axes in another order, or of the types that JAX makes by default, are taken.
    mesh = Transformer(DENSE, mesh=jax.make_mesh((2, 4), ("model", "data"))).mesh
    assert mesh.axis_names == ("data", "model")
    assert mesh.devices.shape == (4, 2)


def main(text: str) -> None:
    """Asserts all that is claimed about this mesh."""
    mesh = sharding.parse_mesh(text)
    config, how = CASES[text]
    params = make_params(config)
    expected, _ = compile_and_decode(config, params, PLAIN, GREEDY, None)
    tokens, program = compile_and_decode(config, params, how, GREEDY, mesh)
    assert tokens == expected, (tokens, expected)
    check_collectives(config, mesh, program)
    if text == "data:2,model:2":
        check_generator(mesh)
    if text == "data:1,model:1":
        with tempfile.TemporaryDirectory() as folder:
            check_loading(sharding.parse_mesh("data:2,model:2"), folder)
        check_refusals()


if __name__ == "__main__":
    main(sys.argv[1])
