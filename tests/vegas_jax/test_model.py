"""The model against transformers (tests/goldens/make_goldens.py), and its pure functions."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vegas_jax
from tests import tiny
from vegas_jax import Generator, SamplingParams, SpecConfig
from vegas_jax.cache import init_cache
from vegas_jax.checkpoint.hf_config import ARCHITECTURES
from vegas_jax.model.forward import prefill_chunk

GOLDENS = Path(__file__).parents[1] / "goldens"
CHECKPOINTS = sorted(path.parent.name for path in GOLDENS.glob("*/golden.npz"))
METHODS = ("plain", "vegas")


def read_fields(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def padded(prompts: list[np.ndarray]) -> tuple[jax.Array, jax.Array]:
    lengths = [len(p) for p in prompts]
    tokens = np.zeros((len(prompts), max(lengths)), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return jnp.asarray(tokens), jnp.asarray(lengths, jnp.int32)


def golden_prompts(golden) -> dict[int, np.ndarray]:
    names = [name for name in golden if name.startswith("prompt_")]
    return {len(golden[name]): golden[name] for name in names}


@pytest.mark.parametrize("name", CHECKPOINTS)
class TestAgainstTransformers:
    """Logits within 1e-4 in float32, greedy tokens equal."""

    def test_logits(self, name):
        model, params, _ = vegas_jax.load(GOLDENS / name, dtype="float32")
        golden = np.load(GOLDENS / name / "golden.npz")
        prompts = golden_prompts(golden)
        tokens, lengths = padded(list(prompts.values()))
        logits = vegas_jax.logits(model, params, tokens, lengths)
        assert logits.dtype == jnp.float32
        for row, n in zip(logits, prompts, strict=True):
            expected = golden[f"logits_{n}"]
            np.testing.assert_allclose(row[golden[f"positions_{n}"]], expected, atol=1e-4)
            assert not row[n:].any()

    def test_greedy_tokens(self, name):
        model, params, _ = vegas_jax.load(GOLDENS / name, dtype="float32")
        golden = np.load(GOLDENS / name / "golden.npz")
        prompts = golden_prompts(golden)
        for method in METHODS:
            spec = SpecConfig(method=method, sparse_ratio=0.05, sparse_min_tokens=8)
            generator = Generator(model, params, spec=spec, max_len=512)
            completions = generator.generate(
                list(prompts.values()), SamplingParams(max_new_tokens=32, ignore_eos=True)
            )
            for n, completion in zip(prompts, completions, strict=True):
                assert completion.token_ids == tuple(golden[f"greedy_{n}"].tolist())
        accepted, drafted = (
            sum(getattr(c.stats, what) for c in completions) for what in ("accepted", "drafted")
        )
        assert accepted < drafted


def test_there_are_goldens_of_every_architecture():
    found = {read_fields(GOLDENS / name)["architectures"][0] for name in CHECKPOINTS}
    assert found == set(ARCHITECTURES)


def test_experts_dequantised_at_load_are_those_that_stay_packed():
    folder = GOLDENS / "gpt-oss-mxfp4"
    packed, small, _ = vegas_jax.load(folder, dtype="float32")
    model, params, _ = vegas_jax.load(folder, dtype="float32", dequantize=True)
    assert packed.config.moe.packed
    assert small["layers_0"]["mlp"]["gate_up_blocks"].dtype == jnp.uint8
    assert params["layers_0"]["mlp"]["gate_up"].dtype == jnp.float32
    tokens, lengths = padded([np.load(folder / "golden.npz")["prompt_129"]])
    expected = vegas_jax.logits(model, params, tokens, lengths)
    found = vegas_jax.logits(packed, small, tokens, lengths)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_the_shipped_checkpoint_is_that_of_transformers():
    model, params, tokenizer = vegas_jax.load("codelm-16m", dtype="float32")
    golden = np.load(GOLDENS / "codelm-16m.npz")
    assert tokenizer.encode(str(golden["text"])) == golden["prompt"].tolist()
    tokens, lengths = padded([golden["prompt"]])
    logits = vegas_jax.logits(model, params, tokens, lengths)[0, golden["positions"]]
    top = jnp.take_along_axis(logits, jnp.asarray(golden["top_ids"]), axis=1)
    np.testing.assert_allclose(top, golden["top_logits"], atol=1e-4)
    np.testing.assert_allclose(jax.nn.logsumexp(logits, -1), golden["logsumexp"], atol=1e-4)
    for method in METHODS:
        spec = SpecConfig(method=method, sparse_min_tokens=16)
        generator = Generator(model, params, tokenizer, spec=spec, max_len=512)
        sampling = SamplingParams(max_new_tokens=32, ignore_eos=True)
        (completion,) = generator.generate([str(golden["text"])], sampling)
        assert completion.token_ids == tuple(golden["greedy"].tolist())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types_stay_close_and_give_float32_logits(dtype):
    folder = GOLDENS / "qwen3-tied"
    wide_model, wide, _ = vegas_jax.load(folder, dtype="float32")
    model, params, _ = vegas_jax.load(folder, dtype=dtype)
    tokens, lengths = padded([np.load(folder / "golden.npz")["prompt_129"]])
    expected = vegas_jax.logits(wide_model, wide, tokens, lengths)
    logits = vegas_jax.logits(model, params, tokens, lengths)
    assert logits.dtype == jnp.float32
    # Relative to the logits' own spread: 8 bits of mantissa, or 11, through three layers.
    error = np.abs(logits - expected) / np.std(expected)
    assert np.quantile(error, 0.99) < {"bfloat16": 0.15, "float16": 0.02}[dtype]
    for method in METHODS:
        generator = Generator(model, params, spec=SpecConfig(method=method), max_len=200)
        (completion,) = generator.generate([tokens[0]], SamplingParams(max_new_tokens=8))
        assert len(completion.token_ids) == 8


def test_prefill_in_chunks_is_one_forward_pass_whatever_the_padding():
    prompts = tiny.prompts([70, 33])
    tokens, lengths = padded([np.asarray(p) for p in prompts])
    cache = init_cache(tiny.CONFIG, 2, 128, tiny.MODEL.dtype)
    whole, _ = prefill_chunk(
        tiny.MODEL, tiny.params(), cache, tokens, jnp.zeros(2, jnp.int32), lengths
    )
    slots = jnp.asarray([1], jnp.int32)
    pieces = []
    for start in range(0, 70, 32):
        piece = jnp.pad(tokens[:1], ((0, 0), (0, 32)), constant_values=5)[:, start : start + 32]
        hidden, cache = prefill_chunk(
            tiny.MODEL,
            tiny.params(),
            cache,
            piece,
            jnp.asarray([start], jnp.int32),
            jnp.asarray([min(32, 70 - start)], jnp.int32),
            slots,
        )
        pieces.append(hidden[0])
    np.testing.assert_array_equal(cache.lengths, [0, 70])
    assert not cache.layers[0][0][0].any()  # the other slot was not written
    np.testing.assert_allclose(jnp.concatenate(pieces)[:70], whole[0, :70], atol=1e-4)


def test_prefill_never_makes_logits_of_all_tokens():
    batch, length = 1, 20_000
    config = vegas_jax.ModelConfig(**{**vars(tiny.CONFIG), "vocab_size": 10_000})
    model = vegas_jax.Transformer(config)
    sampling, spec = SamplingParams(), SpecConfig()

    def run(params, tokens, lengths):
        state = vegas_jax.spec.init_state(model, spec, sampling, batch=batch, max_len=length + 8)
        requests = vegas_jax.spec.new_requests(
            config, spec, sampling, batch=batch, max_len=length + 8, limits=jnp.ones(1, jnp.int32)
        )
        processors = vegas_jax.Processors.of(sampling)
        return vegas_jax.spec.prefill(
            model, params, state, requests, tokens, lengths, spec, processors
        )

    arguments = (
        jax.eval_shape(lambda: tiny.params(config)),
        jax.ShapeDtypeStruct((batch, length), jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )
    memory = jax.jit(run).lower(*arguments).compile().memory_analysis()
    all_logits = length * config.vocab_size * 4
    assert memory.temp_size_in_bytes < all_logits / 5
