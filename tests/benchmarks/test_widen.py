import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vegas_jax
from benchmarks.widen import sources, widen, widen_cache
from tests import tiny
from vegas_jax import ModelConfig, SamplingParams, SpecConfig
from vegas_jax.compiled import prefill_slot
from vegas_jax.model.forward import logits
from vegas_jax.spec import init_state

WIDE = {"vocab_size": 8300, "hidden_size": 384, "intermediate_size": 1024}
HEADS = {"num_heads": 16, "num_kv_heads": 4, "num_layers": 11}


@pytest.fixture(scope="module")
def models():
    """The shipped checkpoint, and a wide one, in float32."""
    model, params, tokenizer = vegas_jax.load(dtype="float32")
    config = dataclasses.replace(model.config, **WIDE, **HEADS, tie_word_embeddings=False)
    return (model, params), widen(model, params, config), tokenizer


def test_computes_the_same_logits(models):
    (model, params), (wide, wide_params), tokenizer = models
    tokens = jnp.array([tokenizer.encode("def read(path):\n    with open(path) as file:\n")])
    lengths = jnp.array([tokens.shape[1]])
    expected = logits(model, params, tokens, lengths)
    found = logits(wide, wide_params, tokens, lengths)
    vocab = model.config.vocab_size
    np.testing.assert_allclose(found[..., :vocab], expected, rtol=0, atol=1e-4)
    assert found[..., vocab:].max() < expected.min() - 100


def test_decodes_the_same_rounds():
    config = dataclasses.replace(
        tiny.CONFIG, hidden_size=64, num_layers=3, num_heads=8, tie_word_embeddings=False
    )
    config = dataclasses.replace(config, num_kv_heads=4, vocab_size=128, intermediate_size=64)
    spec = SpecConfig(sparse_min_tokens=16, num_speculative_tokens=3)
    sampling = SamplingParams(max_new_tokens=24, ignore_eos=True)
    found = []
    for model, params in (
        (tiny.MODEL, tiny.params()),
        widen(tiny.MODEL, tiny.params(), config),
    ):
        generator = vegas_jax.Generator(model, params, spec=spec, max_len=256)
        found.append(generator.generate(tiny.prompts([90, 130]), sampling))
    for small, wide in zip(*found, strict=True):
        assert small.token_ids == wide.token_ids
        assert small.kinds == wide.kinds  # what was accepted, and where


def test_a_cache_is_what_the_wide_model_writes(models):
    (model, params), (wide, wide_params), _ = models
    caches = []
    for one, weights in ((model, params), (wide, wide_params)):
        state = init_state(one, SpecConfig(), SamplingParams(), batch=2, max_len=64)
        caches.append(prefill_slot(one, weights, state.cache, list(range(50)), 1))
    made = widen_cache(model.config, wide.config, caches[0])
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, caches[1])
    for layer, source in enumerate(sources(model.config, wide.config)):
        for mine, written in zip(made.layers[layer], caches[1].layers[layer], strict=True):
            if source is not None:
                np.testing.assert_allclose(mine[1, :, :50], written[1, :, :50], atol=2e-4)


def test_layers_are_spread():
    small = ModelConfig(8, 8, 8, 2, 2, 2, 4)
    assert sources(small, dataclasses.replace(small, num_layers=5)) == [0, None, 1, None, None]


@pytest.mark.parametrize(
    "change", [{"head_dim": 64}, {"num_kv_heads": 5, "num_heads": 20}, {"hidden_size": 320}]
)
def test_refuses_what_does_not_hold_it(models, change):
    (model, params), (wide, _), _ = models
    with pytest.raises(ValueError, match=next(iter(change))):
        widen(model, params, dataclasses.replace(wide.config, **change))
