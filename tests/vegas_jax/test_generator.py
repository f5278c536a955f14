"""Requests through slots: independence of each other, limits, stops, statistics."""

import itertools
import types

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

import vegas_jax
from tests import tiny
from vegas_jax import Generator, InputError, Kind, SamplingParams, SpecConfig, Stats
from vegas_jax.compiled import decode_jit
from vegas_jax.sampling import Processors
from vegas_jax.spec.state import cache_rows

SPEC = SpecConfig(sparse_ratio=0.05, sparse_min_tokens=8, sparse_block_size=8)
MAX_LEN = 400
PROMPTS = tiny.prompts([3, 40, 1, 200, 120, 7], seed=5)
RANDOM = SamplingParams(max_new_tokens=24, temperature=0.9, logprobs=True)


def generator(spec: SpecConfig = SPEC, **kwargs) -> Generator:
    kwargs = {"max_len": MAX_LEN, "batch_size": 2, **kwargs}
    return Generator(tiny.MODEL, tiny.params(), spec=spec, **kwargs)


def check_consistent(completion, gamma: int) -> None:
    s = completion.stats
    kinds = completion.kinds
    assert len(completion.token_ids) == len(kinds) == s.emitted
    assert completion.logprobs is None or len(completion.logprobs) == s.emitted
    assert s.accepted == sum(k == Kind.ACCEPTED for k in kinds)
    assert s.accepted <= s.drafted <= gamma * s.rounds
    ends = sum(k in (Kind.CORRECTED, Kind.BONUS) for k in kinds)
    assert s.rounds - 1 <= ends <= s.rounds
    assert s.emitted == 0 or kinds[0] == Kind.FIRST
    assert all(0 <= a <= 1 for a in s.acceptance_by_position)


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_tokens_depend_on_the_own_seed_only(acceptance):
    spec = SpecConfig(**{**vars(SPEC), "acceptance": acceptance})
    seeds = (11, 12, 13, 14, 15, 16)
    sampling = SamplingParams(**{**vars(RANDOM), "seed": seeds})
    batched = generator(spec).generate(PROMPTS, sampling)
    for completion in batched:
        check_consistent(completion, spec.num_speculative_tokens)
    order = [4, 2, 0, 5, 1, 3]
    shuffled = generator(spec, batch_size=4).generate(
        [PROMPTS[i] for i in order],
        SamplingParams(**{**vars(sampling), "seed": tuple(seeds[i] for i in order)}),
    )
    for i, completion in zip(order, shuffled, strict=True):
        assert completion.token_ids == batched[i].token_ids
        np.testing.assert_allclose(completion.logprobs, batched[i].logprobs, atol=1e-4)
    alone = generator(spec, batch_size=1).generate(
        [PROMPTS[3]], SamplingParams(**{**vars(sampling), "seed": 14})
    )
    assert alone[0].token_ids == batched[3].token_ids
    other = generator(spec).generate([PROMPTS[3]], SamplingParams(**{**vars(sampling), "seed": 15}))
    assert other[0].token_ids != batched[3].token_ids


def test_one_seed_serves_every_prompt_alike():
    first, second = generator().generate([PROMPTS[0], PROMPTS[0]], RANDOM)
    assert first.token_ids == second.token_ids


def test_refilling_a_slot_leaves_the_others_bit_identical():
    gen = generator()
    job = types.SimpleNamespace
    state = gen._empty_state(2, RANDOM)
    for slot in range(2):
        state = gen._admit(
            state, job(prompt=tuple(PROMPTS[slot + 3]), limit=20, seed=slot), slot, RANDOM
        )
    state = gen._advance(state, RANDOM, max_rounds=2)
    before = jax.device_get(state)
    state = gen._admit(state, job(prompt=tuple(PROMPTS[1]), limit=20, seed=9), 0, RANDOM)
    after = jax.device_get(state)
    length = before.cache.lengths[1]
    for old, new in zip(
        jax.tree.leaves(before.cache.layers), jax.tree.leaves(after.cache.layers), strict=True
    ):
        np.testing.assert_array_equal(old[1, :, :length], new[1, :, :length])
    pick = (before.requests, before.selection.counts, before.selection.tail_start)
    pick_after = (after.requests, after.selection.counts, after.selection.tail_start)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[1], y[1]), pick, pick_after)
    np.testing.assert_array_equal(before.selection.blocks[:, 1], after.selection.blocks[:, 1])


def test_finished_sequences_stand_still():
    gen = generator(batch_size=2)
    job = types.SimpleNamespace
    state = gen._empty_state(2, RANDOM)
    state = gen._admit(state, job(prompt=tuple(PROMPTS[1]), limit=3, seed=0), 0, RANDOM)
    state = gen._admit(state, job(prompt=tuple(PROMPTS[4]), limit=60, seed=0), 1, RANDOM)
    state = gen._advance(state, RANDOM, max_rounds=100, stop_on_any_done=True)
    assert state.requests.done[0]
    assert not state.requests.done[1]
    before = jax.device_get(state.requests.rows(jnp.asarray([0])))
    length = int(state.cache.lengths[0])
    k_before = np.asarray(state.cache.layers[0][0][0, :, :length])
    state = gen._advance(state, RANDOM, max_rounds=100)
    assert state.requests.done.all()
    after = jax.device_get(state.requests.rows(jnp.asarray([0])))
    before = before.replace(accepted=None)
    after = after.replace(accepted=None)
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert int(state.cache.lengths[0]) == length
    np.testing.assert_array_equal(state.cache.layers[0][0][0, :, :length], k_before)


@pytest.mark.parametrize("method", ["vegas", "plain"])
@pytest.mark.parametrize("new_tokens", [0, 1, 2, 5, 7, 8])
def test_max_new_tokens_is_exact(method, new_tokens):
    spec = SpecConfig(**{**vars(SPEC), "method": method})
    sampling = SamplingParams(max_new_tokens=new_tokens, logprobs=True)
    for completion in generator(spec).generate(PROMPTS[:3], sampling):
        assert len(completion.token_ids) == new_tokens
        assert completion.finish_reason == "length"
        check_consistent(completion, spec.num_drafts)


@pytest.mark.parametrize("room", [0, 1, 6, 7, 8])
def test_prompts_near_max_len_are_exact_or_refused(room):
    prompt = tiny.prompts([MAX_LEN - room], seed=9)[0]
    everything = SamplingParams(max_new_tokens=None)
    if room == 0:
        with pytest.raises(InputError, match=f"has {MAX_LEN} tokens.*max_len {MAX_LEN}"):
            generator().generate([prompt], everything)
        return
    (completion,) = generator().generate([prompt], everything)
    assert len(completion.token_ids) == room
    assert completion.finish_reason == "cache"
    plain = generator(SpecConfig(method="plain"))
    (expected,) = plain.generate([prompt], SamplingParams(max_new_tokens=room))
    assert completion.token_ids == expected.token_ids
    assert expected.finish_reason == "length"
    with pytest.raises(InputError, match=f"max_new_tokens {room + 1} .*max_len {MAX_LEN}"):
        generator().generate([prompt], SamplingParams(max_new_tokens=room + 1))


def test_results_do_not_depend_on_max_len():
    expected = generator().generate(PROMPTS, RANDOM)
    longer = generator(max_len=3 * MAX_LEN).generate(PROMPTS, RANDOM)
    assert [c.token_ids for c in longer] == [c.token_ids for c in expected]


@pytest.mark.parametrize("method", ["vegas", "dense", "plain"])
def test_a_stop_token_inside_an_accepted_block_ends_the_sequence_there(method):
    spec = SpecConfig(**{**vars(SPEC), "method": method, "num_speculative_tokens": 9})
    sampling = SamplingParams(max_new_tokens=40)
    for prompt in PROMPTS[:4]:
        (free,) = generator(spec).generate([prompt], sampling)
        for token in sorted(set(free.token_ids))[:3]:
            at = free.token_ids.index(token)
            (stopped,) = generator(spec).generate(
                [prompt], SamplingParams(max_new_tokens=40, stop_token_ids=(token,), logprobs=True)
            )
            assert stopped.token_ids == free.token_ids[: at + 1]
            assert stopped.finish_reason == "stop"
            check_consistent(stopped, spec.num_drafts)


def test_eos_of_the_checkpoint_stops_unless_ignored():
    (free,) = generator().generate([PROMPTS[1]], SamplingParams(max_new_tokens=30))
    eos = free.token_ids[12]
    config = vegas_jax.ModelConfig(**{**vars(tiny.CONFIG), "eos_token_ids": (96, eos)})
    gen = Generator(
        vegas_jax.Transformer(config), tiny.params(), spec=SPEC, max_len=MAX_LEN, batch_size=2
    )
    (stopped,) = gen.generate([PROMPTS[1]], SamplingParams(max_new_tokens=30))
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(eos) + 1]
    (ignored,) = gen.generate([PROMPTS[1]], SamplingParams(max_new_tokens=30, ignore_eos=True))
    assert ignored.token_ids == free.token_ids


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_logprobs_are_those_of_teacher_forcing(acceptance):
    spec = SpecConfig(**{**vars(SPEC), "acceptance": acceptance})
    sampling = SamplingParams(max_new_tokens=20, temperature=0.7, top_k=10, logprobs=True)
    (completion,) = generator(spec).generate([PROMPTS[3]], sampling)
    tokens = jnp.asarray([PROMPTS[3] + list(completion.token_ids)], jnp.int32)
    rows = vegas_jax.logits(tiny.MODEL, tiny.params(), tokens, jnp.asarray([tokens.shape[1]]))
    logprobs = jax.nn.log_softmax(rows[0], -1)
    begin = len(PROMPTS[3]) - 1
    expected = [float(logprobs[begin + i, t]) for i, t in enumerate(completion.token_ids)]
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_streaming_gives_the_tokens_of_generate_round_by_round():
    gen = generator()
    (expected,) = gen.generate([PROMPTS[3]], RANDOM)
    deltas = list(gen.stream(PROMPTS[3], RANDOM))
    assert tuple(itertools.chain.from_iterable(d.token_ids for d in deltas)) == expected.token_ids
    assert deltas[0].drafted == ()
    assert all(d.completion is None for d in deltas[:-1])
    final = deltas[-1].completion
    assert final.token_ids == expected.token_ids
    assert final.kinds == expected.kinds
    for delta in deltas[1:]:
        assert len(delta.drafted) == SPEC.num_speculative_tokens
        assert delta.token_ids[: delta.accepted] == delta.drafted[: delta.accepted]
        assert len(delta.token_ids) - delta.accepted in (0, 1)


def test_an_abandoned_stream_and_a_second_run_work():
    gen = generator()
    next(gen.stream(PROMPTS[3], RANDOM))
    stream = gen.as_completed(PROMPTS, RANDOM)
    next(stream)
    assert gen.generate(PROMPTS[:2], RANDOM) is not None


def test_a_generator_that_has_room_for_one_token_and_none_to_write():
    gen = generator(max_len=1)
    none = SamplingParams(max_new_tokens=0)
    gen.warmup(none)
    (completion,) = gen.generate([[5]], none)
    assert completion.token_ids == ()


def test_no_recompilation_across_prompts_lengths_and_sampling_values():
    gen = generator()
    sampling = SamplingParams(temperature=0.8, top_k=5, top_p=0.9, max_new_tokens=10)
    gen.warmup(sampling)
    gen.generate(PROMPTS[:2], sampling)
    compiled: list[str] = []

    def listen(event: str, duration: float, **kwargs) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for prompts, values in (
            (PROMPTS, {"temperature": 1.3, "top_k": 9, "top_p": 0.5, "seed": 77}),
            (tiny.prompts([390, 2, 77]), {"max_new_tokens": 3, "stop_token_ids": (4, 5)}),
            (PROMPTS[:2], {"max_new_tokens": None, "temperature": 0.1}),
        ):
            gen.generate(prompts, SamplingParams(**{**vars(sampling), **values}))
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiled == []


@pytest.mark.parametrize("method", ["vegas", "streaming", "dense", "plain"])
def test_the_compiled_loop_updates_the_cache_in_place(method):
    spec = SpecConfig(**{**vars(SPEC), "method": method})
    max_len = 60_000
    state = jax.eval_shape(
        lambda: vegas_jax.spec.init_state(
            tiny.MODEL, spec, SamplingParams(temperature=0.8), batch=2, max_len=max_len
        )
    )
    compiled = decode_jit.lower(
        model=tiny.MODEL,
        params=tiny.params(),
        state=state,
        spec=spec,
        processors=Processors.of(SamplingParams(temperature=0.8)),
        max_rounds=np.int32(1),
        stop_on_any_done=np.bool_(False),
    ).compile()
    memory = compiled.memory_analysis()
    k = state.cache.layers[0][0]
    one_layer = 2 * k.size * k.dtype.itemsize
    assert memory.alias_size_in_bytes >= one_layer * tiny.CONFIG.num_layers
    assert memory.temp_size_in_bytes < one_layer / 2
    assert cache_rows(max_len, spec) == k.shape[2]


def test_non_finite_logits_stop_the_run_and_say_where():
    params = jax.tree.map(lambda w: w, tiny.params())
    params["layers_1"]["mlp"]["down"] = params["layers_1"]["mlp"]["down"].at[0, 0].set(jnp.nan)
    gen = Generator(tiny.MODEL, params, spec=SPEC, max_len=MAX_LEN)
    with pytest.raises(vegas_jax.NonFiniteLogitsError, match="position 39 of prompt 0"):
        gen.generate([PROMPTS[1]], RANDOM)


@pytest.mark.parametrize(
    ("prompts", "sampling", "message"),
    [
        ([[]], {}, "prompt 0: prompt is empty"),
        ([[1], [97]], {}, "prompt 1: prompt has the token id 97, but ids go from 0 to 96"),
        ([[1], [-1]], {}, "token id -1"),
        (["text"], {}, "no tokenizer.json; give token ids"),
        ([[1]], {"stop": ("x",)}, "stop needs a tokenizer"),
        ([[1], [2]], {"seed": (1, 2, 3)}, "seed has 3 values, but there are 2 prompts"),
        ("text", {}, "prompts is a str, but must be a list of prompts"),
        ([[1]], {"stop_token_ids": tuple(range(17))}, "at most 16 ids"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(prompts, sampling, message):
    gen = generator()
    gen._admit = None  # nothing may run
    with pytest.raises(InputError, match=message):
        gen.generate(prompts, SamplingParams(**sampling))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_len": 0}, "max_len is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"max_len": 70_000}, "max_len is 70000, but the model knows positions up to 65536"),
    ],
)
def test_bad_generators(arguments, message):
    with pytest.raises(InputError, match=message):
        generator(**arguments)


def test_no_prompts_give_no_completions():
    assert generator().generate([], RANDOM) == []


def test_statistics_count_only_what_was_kept():
    A, C, B = Kind.ACCEPTED, Kind.CORRECTED, Kind.BONUS
    kinds = [Kind.FIRST, A, A, C, A, A, A, B, C, A]  # the last round was cut after one draft
    stats = Stats.from_kinds(kinds, 3, prefill_s=1.0, decode_s=3.0)
    assert stats.rounds == 4
    assert stats.drafted == 3 + 3 + 3 + 1
    assert stats.accepted == 2 + 3 + 0 + 1
    assert stats.emitted == 10
    assert stats.mean_acceptance_length == 9 / 4
    assert stats.acceptance_by_position == (3 / 4, 2 / 3, 1 / 3)
    assert stats.tokens_per_second == 3.0
