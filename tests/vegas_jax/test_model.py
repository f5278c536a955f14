"""The model's pure functions, its dtypes, and the shipped checkpoint."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vegas_jax
from tests import tiny
from tests.vegas_jax.test_goldens import GOLDENS, METHODS, padded
from vegas_jax import Generator, SamplingParams, SpecConfig
from vegas_jax.cache import init_cache
from vegas_jax.model.forward import prefill_chunk


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
