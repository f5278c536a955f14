"""Speculative sampling keeps the model's distribution: chi-square against the exact one."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import vegas_jax
from tests import tiny
from vegas_jax import ModelConfig, Processors, SamplingParams, SpecConfig, Transformer
from vegas_jax.sampling import SamplingValues, process_logits
from vegas_jax.spec import round as spec_round_module
from vegas_jax.spec.acceptance import accept_rejection

CONFIG = ModelConfig(
    vocab_size=7,
    hidden_size=16,
    intermediate_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
)
MODEL = Transformer(CONFIG)
PARAMS = tiny.params(CONFIG, seed=2, sharpness=30.0)
PROMPT = tiny.prompts([60], CONFIG.vocab_size)[0]
NEW_TOKENS = 4
SEQUENCES = 3000
SAMPLING = SamplingParams(
    max_new_tokens=NEW_TOKENS,
    temperature=0.9,
    top_k=6,
    top_p=0.97,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    seed=tuple(range(SEQUENCES)),
)
# Drafts attend to hardly anything, so q is far from p and much is refused.
SPEC = SpecConfig(
    method="streaming", num_speculative_tokens=3, sparse_ratio=0.01, sparse_min_tokens=1
)


def sample(spec: SpecConfig):
    """NEW_TOKENS tokens for every seed, and how many drafts were accepted and made."""
    processors = Processors.of(SAMPLING)

    @jax.jit
    def run(params):
        tokens = jnp.tile(jnp.asarray([PROMPT], jnp.int32), (SEQUENCES, 1))
        lengths = jnp.full(SEQUENCES, len(PROMPT), jnp.int32)
        sizes = {"batch": SEQUENCES, "max_len": len(PROMPT) + NEW_TOKENS}
        state = vegas_jax.spec.init_state(MODEL, spec, SAMPLING, **sizes)
        requests = vegas_jax.spec.new_requests(
            CONFIG,
            spec,
            SAMPLING,
            **sizes,
            limits=jnp.full(SEQUENCES, NEW_TOKENS, jnp.int32),
            prompts=tokens,
            prompt_lengths=lengths,
        )
        state = vegas_jax.spec.prefill(
            MODEL, params, state, requests, tokens, lengths, spec, processors
        )
        return vegas_jax.spec.decode(MODEL, params, state, spec, processors).requests

    requests = run(PARAMS)
    kinds = np.asarray(requests.kinds[:, 1:NEW_TOKENS])
    return np.asarray(requests.tokens[:, :NEW_TOKENS]), (kinds == vegas_jax.Kind.ACCEPTED).mean()


def exact_distribution() -> dict[tuple[int, ...], float]:
    """Probability of every continuation under plain sampling, by enumeration."""
    vocabulary = range(CONFIG.vocab_size)
    prefixes = list(itertools.product(vocabulary, repeat=NEW_TOKENS - 1))
    texts = jnp.asarray([PROMPT + list(p) for p in prefixes], jnp.int32)
    lengths = jnp.full(len(prefixes), texts.shape[1], jnp.int32)
    logits = vegas_jax.logits(MODEL, PARAMS, texts, lengths)[:, len(PROMPT) - 1 :]
    tokens = texts[:, len(PROMPT) :]
    seen = jnp.cumsum(jax.nn.one_hot(tokens, CONFIG.vocab_size, dtype=jnp.int32), 1)
    counts = jnp.pad(seen, ((0, 0), (1, 0), (0, 0)))
    in_prompt = np.isin(np.arange(CONFIG.vocab_size), PROMPT)
    processed = process_logits(
        logits,
        SamplingValues.of(SAMPLING, len(prefixes), (0,) * len(prefixes)),
        Processors.of(SAMPLING),
        jnp.asarray(np.tile(in_prompt, (len(prefixes), 1))),
        counts,
    )
    p = np.asarray(jax.nn.softmax(processed.astype(jnp.float32), -1), np.float64)
    result = {}
    for row, prefix in zip(p, prefixes, strict=True):
        before = np.prod([row[i, token] for i, token in enumerate(prefix)])
        for token in vocabulary:
            result[(*prefix, token)] = before * row[-1, token]
    assert np.isclose(sum(result.values()), 1.0, atol=1e-4)
    return result


def p_value(tokens: np.ndarray) -> float:
    """Of a chi-square test that the sampled continuations have the exact distribution."""
    exact = exact_distribution()
    possible = {text: p for text, p in exact.items() if p > 0}
    assert {tuple(t) for t in tokens.tolist()} <= set(possible)
    cells: dict[tuple[int, ...] | str, list[float]] = {}
    counts: dict[tuple[int, ...], int] = {}
    for text in map(tuple, tokens.tolist()):
        counts[text] = counts.get(text, 0) + 1
    for text, p in possible.items():  # cells of fewer than 8 expected are merged into one
        cell = cells.setdefault(text if p * SEQUENCES >= 8 else "rare", [0.0, 0.0])
        cell[0] += counts.get(text, 0)
        cell[1] += p * SEQUENCES
    observed, expected = np.array(list(cells.values())).T
    assert len(observed) > 30
    return stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue


def test_rejection_sampling_has_the_distribution_of_plain_sampling():
    tokens, acceptance = sample(SPEC)
    assert 0.1 < acceptance < 0.7
    assert p_value(tokens) > 0.01


def test_plain_sampling_has_the_exact_distribution():
    assert p_value(sample(SpecConfig(method="plain"))[0]) > 0.01


@pytest.mark.parametrize("wrong", ["accepts_too_much", "other_q", "no_residual"])
def test_the_chi_square_test_sees_a_wrong_accept_ratio(monkeypatch, wrong):
    def broken(drafts, q, p, seeds, rounds):
        if wrong == "accepts_too_much":  # p/q taken too large
            q = q * jnp.where(jax.nn.one_hot(drafts, CONFIG.vocab_size) > 0, 0.75, 1.0)
        elif wrong == "other_q":  # q of another temperature than the draft was drawn at
            q = jax.nn.softmax(0.7 * jnp.log(q), -1)
        accepted, following = accept_rejection(drafts, q, p, seeds, rounds)
        if wrong == "no_residual":  # the refused draft's mass is not taken out
            row = jnp.take_along_axis(p, accepted[:, None, None], axis=1)[:, 0]
            keys = jax.vmap(lambda s, r: vegas_jax.sampling.noise_key(s, 9, r))(seeds, rounds)
            following = vegas_jax.sampling.draw(row, keys)
        return accepted, following

    monkeypatch.setattr(spec_round_module, "accept_rejection", broken)
    assert p_value(sample(SPEC)[0]) < 1e-6


def test_noise_depends_on_seed_round_step_and_purpose_only():
    from vegas_jax.sampling import ACCEPT, DRAFT, noise_key

    seed = jnp.asarray([1, 2], jnp.uint32)
    draws = {
        (purpose, index, step): float(jax.random.uniform(noise_key(seed, purpose, index, step)))
        for purpose in (DRAFT, ACCEPT)
        for index in (0, 1)
        for step in (0, 1)
    }
    assert len(set(draws.values())) == len(draws)
