"""Logits processors against their definitions by sorting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vegas_jax import Processors, SamplingParams
from vegas_jax.sampling import SamplingValues, draw_coupled, process_logits

VOCABULARY = 23


def processed(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """`process_logits` of one row, as kept-token mask and values."""
    values = SamplingValues.of(params, 1)
    out = process_logits(
        jnp.asarray(logits, jnp.float32)[None, None], values, Processors.of(params)
    )
    return np.asarray(out)[0, 0]


def expected_kept(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Kept tokens by sorting, where no two logits are close."""
    z = logits.astype(np.float64) / params.temperature
    kept = np.ones(len(z), bool)
    order = np.argsort(-z)
    if params.top_k:
        kept[order[params.top_k :]] = False
    if params.top_p < 1:
        p = np.where(kept, np.exp(z - z.max()), 0)
        p /= p.sum()
        reached = np.cumsum(p[order]) >= params.top_p
        kept[order[np.argmax(reached) + 1 :]] = False
    if params.min_p:
        kept &= np.exp(z - z.max()) >= params.min_p
    return kept


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**20),
    temperature=st.sampled_from([0.1, 0.8, 1.0, 5.0]),
    top_k=st.sampled_from([0, 1, 5, VOCABULARY, 10 * VOCABULARY]),
    top_p=st.sampled_from([1e-46, 1e-6, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_threshold_search_keeps_what_sorting_keeps(seed, temperature, top_k, top_p, min_p):
    logits = 3 * np.random.default_rng(seed).normal(size=VOCABULARY).astype(np.float32)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    out = processed(logits, params)
    kept = np.isfinite(out)
    expected = expected_kept(logits, params)
    np.testing.assert_array_equal(kept, expected)
    np.testing.assert_allclose(
        out[kept], (logits - logits.max())[kept] / temperature, rtol=1e-5, atol=1e-6
    )


def test_top_k_keeps_all_that_equal_the_kth():
    out = processed(
        np.array([1.0, 3.0, 2.0, 2.0, -0.0, 0.0]), SamplingParams(temperature=1.0, top_k=2)
    )
    assert np.isfinite(out).tolist() == [False, True, True, True, False, False]


@pytest.mark.parametrize("temperature", [1e-5, 1e-3])
def test_tiny_temperatures_are_finite_and_take_the_best(temperature):
    params = SamplingParams(temperature=temperature, top_p=0.9, top_k=3)
    logits = jnp.asarray([[[30.0, 29.0, -80.0, 0.0]]])
    values = SamplingValues.of(params, 1)
    out = process_logits(logits, values, Processors.of(params))
    assert not jnp.isnan(out).any()
    position = jnp.zeros((1, 1), jnp.int32)
    assert draw_coupled(out, values, Processors.of(params), position)[0, 0] == 0


def test_penalties():
    params = SamplingParams(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, temperature=0.0
    )
    out = process_logits(
        jnp.asarray([[[4.0, -4.0, 1.0, 1.0]]]),
        SamplingValues.of(params, 1),
        Processors.of(params),
        in_prompt=jnp.asarray([[True, True, False, False]]),
        counts=jnp.asarray([[[0, 2, 0, 1]]], jnp.int32),
    )
    # In the prompt only: repetition. In the output: all three; the other: none.
    np.testing.assert_allclose(out[0, 0], [2.0, -8.0 - 0.5 - 0.5, 1.0, 0.5 - 0.5 - 0.25])


def test_coupled_noise_depends_on_seed_and_position_only():
    params = SamplingParams(temperature=1.0, seed=(3, 4, 3))
    logits = jnp.zeros((3, 5, 1000))
    positions = jnp.asarray([[5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [9, 8, 7, 6, 5]], jnp.int32)
    tokens = draw_coupled(logits, SamplingValues.of(params, 3), Processors.of(params), positions)
    np.testing.assert_array_equal(tokens[0], tokens[2, ::-1])
    assert (tokens[0] != tokens[1]).any()
    assert len(set(np.asarray(tokens[0]).tolist())) > 1


def test_drawing_has_the_softmax_distribution():
    logits = jnp.log(jnp.asarray([0.5, 0.3, 0.2, 0.0]))
    rows = 4000
    values = SamplingValues.of(SamplingParams(temperature=1.0), rows, tuple(range(rows)))
    tokens = draw_coupled(
        jnp.tile(logits[None, None], (rows, 1, 1)),
        values,
        Processors.of(SamplingParams(temperature=1.0)),
        jnp.full((rows, 1), 17, jnp.int32),
    )
    shares = np.bincount(np.asarray(tokens)[:, 0], minlength=4) / rows
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.2, 0.0], atol=0.03)


def test_seeds_use_all_64_bits():
    values = SamplingValues.of(SamplingParams(seed=(1, 1 << 32, (1 << 64) - 1)), 3)
    np.testing.assert_array_equal(values.seed, [[0, 1], [1, 0], [2**32 - 1, 2**32 - 1]])


def test_gumbel_noise_is_that_of_threefry_whatever_the_default():
    params = SamplingParams(temperature=1.0)
    logits, positions = jnp.zeros((1, 1, 50)), jnp.zeros((1, 1), jnp.int32)
    args = (logits, SamplingValues.of(params, 1), Processors.of(params), positions)
    expected = draw_coupled(*args)
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(draw_coupled(*args), expected)
