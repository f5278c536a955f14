"""Rotary frequencies, routing, windows and sinks: the parts in which architectures differ."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vegas_jax
from tests import tiny
from vegas_jax import Generator, SamplingParams, SpecConfig
from vegas_jax.cache import init_cache
from vegas_jax.errors import InputError
from vegas_jax.model.config import ModelConfig, MoEConfig, RopeScaling
from vegas_jax.model.experts import activate, route
from vegas_jax.model.forward import prefill_chunk
from vegas_jax.model.rope import attention_factor, frequencies

MOE = MoEConfig(
    num_experts=4, num_experts_per_tok=2, intermediate_size=48, norm_topk_prob=True, layers=(0, 1)
)
GPT_OSS = dataclasses.replace(
    tiny.CONFIG,
    qk_norm=False,
    qkv_bias=True,
    o_bias=True,
    sinks=True,
    sliding_windows=(32, None),
    moe=dataclasses.replace(MOE, biases=True, swiglu_limit=7.0),
)


def with_rope(scaling, head_dim=64, theta=1e4) -> ModelConfig:
    return dataclasses.replace(
        tiny.CONFIG, head_dim=head_dim, rope_theta=theta, rope_scaling=scaling
    )


class TestFrequencies:
    def test_llama3_keeps_fast_ones_slows_slow_ones_and_blends_between(self):
        scaling = RopeScaling("llama3", 8.0, 256, low_freq_factor=1.0, high_freq_factor=4.0)
        plain = frequencies(with_rope(None))
        found = frequencies(with_rope(scaling))
        seen = set()
        for before, after in zip(plain, found, strict=True):
            wavelength = 2 * math.pi / before
            if wavelength < 256 / 4:
                expected, sort = before, "kept"
            elif wavelength > 256:
                expected, sort = before / 8, "slowed"
            else:
                smooth = (256 / wavelength - 1) / 3
                expected, sort = (1 - smooth) * before / 8 + smooth * before, "blended"
            seen.add(sort)
            assert after == pytest.approx(expected, rel=1e-12)
        assert seen == {"kept", "slowed", "blended"}

    @pytest.mark.parametrize("truncate", [True, False])
    def test_yarn_ramps_between_two_dimensions(self, truncate):
        """gpt-oss's numbers: theta 150000, factor 32, 4,096 tokens, 32 and 1 rotations."""
        scaling = RopeScaling("yarn", 32.0, 4096, truncate=truncate)
        plain = frequencies(with_rope(None, theta=150000.0))
        kept = (frequencies(with_rope(scaling, theta=150000.0)) / plain - 1 / 32) * 32 / 31
        first, last = (
            64 * math.log(4096 / (rotations * 2 * math.pi)) / (2 * math.log(150000.0))
            for rotations in (32, 1)
        )
        assert (first, last) == pytest.approx((8.0927, 17.3980), abs=1e-3)
        if truncate:
            first, last = 8, 18
        ramp = np.clip((np.arange(32) - first) / (last - first), 0, 1)
        np.testing.assert_allclose(kept, 1 - ramp, atol=1e-9)

    def test_linear_slows_all_alike(self):
        found = frequencies(with_rope(RopeScaling("linear", 4.0, 128)))
        np.testing.assert_allclose(found, frequencies(with_rope(None)) / 4)

    def test_yarn_multiplies_queries_and_keys(self):
        scaling = RopeScaling("yarn", 32.0, 4096)
        assert attention_factor(scaling) == pytest.approx(1.34657, abs=1e-5)
        assert attention_factor(dataclasses.replace(scaling, attention_factor=1.5)) == 1.5
        assert attention_factor(RopeScaling("llama3", 8.0, 256)) == 1.0
        assert attention_factor(None) == 1.0


class TestExperts:
    def test_weights_of_the_chosen_ones_add_up_to_one_if_asked(self):
        logits = jax.random.normal(jax.random.key(0), (5, 4))
        experts, weights = route(MOE, logits)
        np.testing.assert_allclose(weights.sum(1), 1.0, rtol=1e-6)
        shares = jax.nn.softmax(logits, -1)
        best = jnp.take_along_axis(shares, experts, 1)
        np.testing.assert_allclose(weights, best / best.sum(1, keepdims=True), rtol=1e-6)
        loose, weights = route(dataclasses.replace(MOE, norm_topk_prob=False), logits)
        np.testing.assert_array_equal(loose, experts)
        np.testing.assert_allclose(weights, best, rtol=1e-6)

    def test_gates_are_clamped_from_above_only(self):
        config = dataclasses.replace(MOE, swiglu_limit=7.0)
        gate, up = np.array([9.0, -9.0, 1.0]), np.array([9.0, -9.0, 1.0])
        found = activate(config, jnp.concatenate([gate, up])[None].astype(jnp.float32))[0]

        def expected(gate, up):
            return (up + 1) * gate / (1 + math.exp(-1.702 * gate))

        wanted = [expected(7, 7), expected(-9, -7), expected(1, 1)]
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


class TestWindows:
    """One layer, so that a key beyond the window can reach nothing."""

    CONFIG = dataclasses.replace(
        GPT_OSS, num_layers=2, sliding_windows=(128, None), moe=None, sinks=False
    )

    @pytest.mark.parametrize(("distance", "seen"), [(127, True), (128, False)])
    def test_a_window_of_128_sees_itself_and_127_before(self, distance, seen):
        # The full layer's attention is silenced: only the windowed one carries anything.
        params = jax.tree.map(lambda x: x, tiny.params(self.CONFIG))
        params["layers_1"]["attn"]["o"] = jnp.zeros_like(params["layers_1"]["attn"]["o"])
        model = vegas_jax.Transformer(self.CONFIG)
        tokens = jnp.asarray(tiny.prompts([200]), jnp.int32)
        changed = tokens.at[0, 199 - distance].add(1)
        logits = [
            vegas_jax.logits(model, params, t, jnp.array([200]))[0, 199] for t in (tokens, changed)
        ]
        assert bool((logits[0] != logits[1]).any()) == seen

    def test_one_layer_at_least_sees_everything(self):
        with pytest.raises(InputError, match="sliding_windows"):
            dataclasses.replace(self.CONFIG, sliding_windows=(128, 128))
        with pytest.raises(InputError, match="sliding_windows"):
            dataclasses.replace(self.CONFIG, sliding_windows=(128,))

    def test_keys_are_chosen_for_full_layers_only(self):
        spec = SpecConfig(sparse_min_tokens=16)
        model = vegas_jax.Transformer(GPT_OSS)
        state = vegas_jax.spec.init_state(model, spec, SamplingParams(), batch=2, max_len=256)
        assert state.selection.blocks.shape[0] == 1
        assert GPT_OSS.full_layers == (1,)


@pytest.mark.parametrize("method", ["vegas", "streaming", "dense"])
def test_gpt_oss_writes_the_tokens_of_plain_decoding(method):
    model, params = vegas_jax.Transformer(GPT_OSS), tiny.params(GPT_OSS)
    params["layers_1"]["attn"]["sinks"] = jnp.linspace(-1, 2, GPT_OSS.num_heads)
    prompts = tiny.prompts((1, 31, 32, 33, 300))
    sampling = SamplingParams(max_new_tokens=24, temperature=0.8, seed=(1, 2, 3, 4, 5))

    def run(method):
        spec = SpecConfig(
            method=method,
            sparse_ratio=0.05,
            sparse_min_tokens=8,
            num_speculative_tokens=3,
            acceptance="coupled",
        )
        return Generator(model, params, spec=spec, max_len=384).generate(prompts, sampling)

    completions = run(method)
    assert [c.token_ids for c in completions] == [c.token_ids for c in run("plain")]
    accepted, drafted = (
        sum(getattr(c.stats, name) for c in completions) for name in ("accepted", "drafted")
    )
    assert accepted == drafted if method == "dense" else 0 < accepted < drafted


def test_nothing_past_the_lengths_matters_to_windows_sinks_and_experts():
    model, params = vegas_jax.Transformer(GPT_OSS), tiny.params(GPT_OSS)
    tokens = jnp.asarray(tiny.prompts([64]), jnp.int32)
    cache = init_cache(GPT_OSS, 1, 128, model.dtype)
    start, count = jnp.zeros(1, jnp.int32), jnp.full(1, 64, jnp.int32)
    expected, _ = prefill_chunk(model, params, cache, tokens, start, count)
    poisoned = cache.replace(layers=jax.tree.map(lambda x: jnp.full_like(x, 1e4), cache.layers))
    found, _ = prefill_chunk(model, params, poisoned, tokens, start, count)
    np.testing.assert_array_equal(found, expected)


def test_bfloat16_stays_close_where_every_part_has_its_own_dtype():
    params = tiny.params(GPT_OSS)
    narrow = vegas_jax.Transformer(GPT_OSS, jnp.dtype("bfloat16"))
    kept = ("scale", "sinks")  # float32 in every model
    cast = jax.tree_util.tree_map_with_path(
        lambda path, x: x if path[-1].key in kept else x.astype(jnp.bfloat16), params
    )
    tokens, lengths = jnp.asarray(tiny.prompts([100]), jnp.int32), jnp.array([100])
    expected = vegas_jax.logits(vegas_jax.Transformer(GPT_OSS), params, tokens, lengths)
    found = vegas_jax.logits(narrow, cast, tokens, lengths)
    assert found.dtype == jnp.float32
    # Eight bits of mantissa, and a few tokens that rounding sends to another expert.
    error = np.abs(found - expected) / np.std(expected)
    assert np.quantile(error, 0.9) < 0.15
