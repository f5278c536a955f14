"""The emitted tokens do not depend on the drafter: the promise everything else stands on."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vegas_jax
from tests import tiny
from vegas_jax import Generator, Kind, SamplingParams, SpecConfig
from vegas_jax.spec import round as spec_round_module

LENGTHS = (1, 2, 17, 130, 511, 512, 1024, 3000)
MAX_LEN = 3100
GREEDY = SamplingParams(max_new_tokens=32)
COUPLED = SamplingParams(
    max_new_tokens=32,
    temperature=0.8,
    top_p=0.95,
    top_k=20,
    min_p=0.001,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.1,
    seed=tuple(range(len(LENGTHS))),
)
SAMPLINGS = {"greedy": GREEDY, "coupled": COUPLED}


# The processors make a program much larger; a model of one layer keeps the suite's time down. That
# they go together with several layers the generator's tests show.
CONFIGS = {"greedy": tiny.CONFIG, "coupled": dataclasses.replace(tiny.CONFIG, num_layers=1)}


def run(spec: SpecConfig, sampling_name: str):
    config = CONFIGS[sampling_name]
    model = vegas_jax.Transformer(config)
    generator = Generator(model, tiny.params(config), spec=spec, max_len=MAX_LEN)
    return generator.generate(tiny.prompts(LENGTHS), SAMPLINGS[sampling_name])


@functools.cache
def plain(sampling_name: str):
    return [c.token_ids for c in run(SpecConfig(method="plain"), sampling_name)]


def same_as_plain(spec: SpecConfig, sampling_name: str):
    completions = run(spec, sampling_name)
    assert [c.token_ids for c in completions] == plain(sampling_name)
    return completions


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("gamma", [1, 3, 6, 9])
@pytest.mark.parametrize("ratio", [0.02, 0.07, 1.0])
@pytest.mark.parametrize("method", ["vegas", "streaming"])
def test_sparse_drafting_gives_the_tokens_of_plain_decoding(method, ratio, gamma, sampling):
    spec = SpecConfig(
        method=method,
        num_speculative_tokens=gamma,
        sparse_ratio=ratio,
        sparse_min_tokens=8,
        sparse_block_size=8,
        acceptance="coupled",
    )
    completions = same_as_plain(spec, sampling)
    drafted = sum(c.stats.drafted for c in completions)
    accepted = sum(c.stats.accepted for c in completions)
    if ratio == 1.0:
        assert accepted == drafted
    else:  # the run proves something only if drafts were refused, and others accepted
        assert 0 < accepted < drafted


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("gamma", [1, 3, 6, 9])
def test_dense_drafting_is_always_accepted(gamma, sampling):
    spec = SpecConfig(method="dense", num_speculative_tokens=gamma, acceptance="coupled")
    for completion in same_as_plain(spec, sampling):
        assert completion.stats.accepted == completion.stats.drafted > 0


@pytest.mark.parametrize(
    "spec",
    [
        SpecConfig.published(),
        SpecConfig.published(score_mode="logit"),
        SpecConfig(score_rows="all", sparse_block_size=32),
        SpecConfig(score_rows="last", per_kv_head=True),
        SpecConfig(score_rows="last_accepted", score_pool=(3, 7)),
        SpecConfig(score_rows="last_accepted", score_mode="logit", per_kv_head=True),
    ],
    ids=lambda spec: (
        f"{spec.score_mode}-{spec.score_rows}-{spec.sparse_block_size}-{spec.per_kv_head}"
    ),
)
def test_every_way_of_scoring_keys_gives_the_tokens_of_plain_decoding(spec):
    spec = SpecConfig(**{**vars(spec), "sparse_min_tokens": 8, "sparse_ratio": 0.02})
    completions = same_as_plain(spec, "greedy")
    assert sum(c.stats.accepted for c in completions) < sum(c.stats.drafted for c in completions)


def test_selected_sets_are_strict_subsets_that_hold_each_position_once():
    spec = SpecConfig(sparse_ratio=0.02, sparse_min_tokens=8, sparse_block_size=8)
    state = state_after(spec, rounds=3)
    lengths = np.asarray(state.cache.lengths)
    selection = state.selection
    for b in range(len(LENGTHS)):
        count, tail = int(selection.counts[b]), int(selection.tail_start[b])
        assert lengths[b] - tail < 2 * spec.num_speculative_tokens + spec.sparse_block_size
        for layer in range(tiny.CONFIG.num_layers):
            blocks = np.asarray(selection.blocks[layer, b, :count])
            assert (np.diff(blocks) > 0).all()
            assert count == 0 or blocks[-1] * 8 + 8 <= tail
    assert int(selection.counts[-1]) * 8 < 0.05 * lengths[-1]
    by_layer = np.asarray(selection.blocks[:, -1, : int(selection.counts[-1])])
    assert (by_layer[0] != by_layer[1]).any()


def test_a_drafter_that_is_always_wrong_changes_nothing(monkeypatch):
    expected = plain("greedy")
    right = np.zeros((len(LENGTHS), 64), np.int32)
    for b, tokens in enumerate(expected):
        right[b, : len(tokens)] = tokens

    def wrong_draft(model, params, state, spec, processors):
        at = state.requests.emitted[:, None] + jnp.arange(spec.num_drafts)[None]
        drafts = jnp.take_along_axis(jnp.asarray(right), at, axis=1)
        return (drafts + 1) % tiny.CONFIG.vocab_size, None, state.cache

    monkeypatch.setattr(spec_round_module, "draft", wrong_draft)
    # A gamma that no other test uses, so that the patched round is really traced.
    for completion, tokens in zip(
        run(SpecConfig(num_speculative_tokens=5), "greedy"), expected, strict=True
    ):
        assert completion.token_ids == tokens
        assert completion.stats.accepted == 0
        assert set(completion.kinds[1:]) == {Kind.CORRECTED}


def state_after(spec: SpecConfig, rounds: int, poison: float | None = None):
    """Prefill and some rounds, one call each, rows past `lengths` overwritten between them."""
    prompts = tiny.prompts(LENGTHS)
    tokens = np.zeros((len(prompts), max(LENGTHS)), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    processors = vegas_jax.Processors.of(GREEDY)

    def poisoned(state):
        if poison is None:
            return state
        row = jnp.arange(state.cache.rows)[None, None, :, None]
        stale = row >= state.cache.lengths[:, None, None, None]
        layers = jax.tree.map(lambda x: jnp.where(stale, poison, x), state.cache.layers)
        return state.replace(cache=state.cache.replace(layers=layers))

    @jax.jit
    def start(params):
        state = vegas_jax.spec.init_state(
            tiny.MODEL, spec, GREEDY, batch=len(prompts), max_len=MAX_LEN
        )
        requests = vegas_jax.spec.new_requests(
            tiny.CONFIG,
            spec,
            GREEDY,
            batch=len(prompts),
            max_len=MAX_LEN,
            limits=jnp.full(len(prompts), 32, jnp.int32),
        )
        return vegas_jax.spec.prefill(
            tiny.MODEL, params, poisoned(state), requests, tokens, lengths, spec, processors
        )

    @jax.jit
    def advance(params, state):
        return poisoned(vegas_jax.spec.decode(tiny.MODEL, params, state, spec, processors, 1))

    state = poisoned(start(tiny.params()))
    for _ in range(rounds):
        state = advance(tiny.params(), state)
    return state


@pytest.mark.parametrize("method", ["vegas", "streaming", "dense", "plain"])
def test_nothing_depends_on_rows_past_the_lengths(method):
    spec = SpecConfig(method=method, sparse_ratio=0.02, sparse_min_tokens=8)
    clean, dirty = (state_after(spec, rounds=5, poison=p) for p in (None, 1e4))
    jax.tree.map(np.testing.assert_array_equal, clean.requests, dirty.requests)
    jax.tree.map(np.testing.assert_array_equal, clean.selection, dirty.selection)
