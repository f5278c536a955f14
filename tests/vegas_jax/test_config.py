"""Settings refuse what makes no sense, in one sentence that names the argument."""

import math

import numpy as np
import pytest

from tests import tiny
from vegas_jax import Generator, InputError, ModelConfig, SamplingParams, SpecConfig, logits


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("method", "fast"),
        ("num_speculative_tokens", 0),
        ("num_speculative_tokens", 65),
        ("num_speculative_tokens", 2.0),
        ("sparse_ratio", 0.0),
        ("sparse_ratio", 1.01),
        ("sparse_ratio", "x"),
        ("sparse_ratio", math.nan),
        ("sparse_min_tokens", 0),
        ("sparse_block_size", 2),
        ("sparse_block_size", 16.0),
        ("sparse_block_size", True),
        ("score_pool", (1,)),
        ("score_pool", (0, -1)),
        ("score_pool", 7),
        ("score_mode", "rank"),
        ("score_rows", None),
        ("per_kv_head", 2),
        ("acceptance", "always"),
    ],
)
def test_spec_config_names_what_is_wrong(argument, value):
    with pytest.raises(InputError, match=f"^{argument} is .*, but must be "):
        SpecConfig(**{argument: value})


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("max_new_tokens", -1),
        ("max_new_tokens", 1.5),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", None),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", 1.0),
        ("repetition_penalty", 0.0),
        ("presence_penalty", math.nan),
        ("frequency_penalty", 1e39),
        ("frequency_penalty", -3e38),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", (1, "a")),
        ("stop", None),
        ("stop", ("",)),
        ("stop_token_ids", 5),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (2**31,)),
        ("ignore_eos", "no"),
    ],
)
def test_sampling_params_name_what_is_wrong(argument, value):
    with pytest.raises(InputError, match=f"^{argument} is .*, but must be "):
        SamplingParams(**{argument: value})


def test_long_values_are_not_echoed_in_full():
    with pytest.raises(InputError) as error:
        SamplingParams(stop_token_ids=[*range(5000), -1])
    assert len(str(error.value)) < 200


def test_lists_and_numpy_integers_are_taken():
    spec = SpecConfig(score_pool=[0, 3], num_speculative_tokens=np.int64(4))
    assert spec == SpecConfig(score_pool=(0, 3), num_speculative_tokens=4)
    sampling = SamplingParams(seed=np.array([3, 4]), stop="x", stop_token_ids=[np.int32(7)])
    assert sampling == SamplingParams(seed=(3, 4), stop=("x",), stop_token_ids=(7,))
    assert hash(sampling) == hash(SamplingParams(seed=(3, 4), stop=("x",), stop_token_ids=(7,)))


def test_published_is_the_authors_released_setting():
    spec = SpecConfig.published()
    assert (spec.score_mode, spec.score_rows) == ("weight", "first+last")
    assert (spec.sparse_block_size, spec.score_pool) == (1, (0, 0))
    assert (spec.sparse_ratio, spec.num_speculative_tokens) == (0.07, 6)
    assert SpecConfig.published(score_mode="logit").score_mode == "logit"


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"num_layers": 0}, "num_layers"),
        ({"max_position_embeddings": -5}, "max_position_embeddings"),
    ],
)
def test_model_config_names_what_is_wrong(changes, argument):
    with pytest.raises(InputError, match=f"^{argument} is "):
        ModelConfig(**{**vars(tiny.CONFIG), **changes})


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([1, 2, 3], "prompt 0: prompt is a int .* goes in a list of its own"),
        ([[1.7]], "neither text nor a list of token ids"),
        ([["1", "2"]], "neither text nor a list of token ids"),
        ([b"abc"], "prompt is a bytes"),
        ([None], "prompt is a NoneType"),
        (5, "prompts is a int, but must be a list of prompts"),
        (b"abc", "prompts is a bytes"),
    ],
)
def test_prompts_are_text_or_token_ids(prompts, message):
    generator = Generator(tiny.MODEL, tiny.params(), max_len=64)
    with pytest.raises(InputError, match=message):
        generator.generate(prompts)


def test_generator_takes_arrays_and_iterators_of_prompts():
    generator = Generator(tiny.MODEL, tiny.params())
    assert generator.max_len == 4096
    assert generator.encode(np.array([1, 2], np.int32)) == [1, 2]
    jobs = generator._jobs(iter([[1], [2]]), SamplingParams(seed=[1, 2]))
    assert [job.seed for job in jobs] == [1, 2]
    with pytest.raises(InputError, match="stop_token_ids has 97, but ids go from 0 to 96"):
        generator.generate([[1]], SamplingParams(stop_token_ids=(97,)))
    with pytest.raises(InputError, match="stop_token_ids has 97"):  # before it compiles
        generator.warmup(SamplingParams(stop_token_ids=(97,)))
    with pytest.raises(InputError, match="must be SamplingParams"):
        generator.generate([[1]], {"max_new_tokens": 3})
    with pytest.raises(InputError, match="spec is 'vegas', but must be a SpecConfig"):
        Generator(tiny.MODEL, tiny.params(), spec="vegas")


@pytest.mark.parametrize(
    ("tokens", "lengths", "argument"),
    [([1, 2], [2], "tokens"), ([[]], [0], "tokens"), ([[1, 2]], [1, 1], "lengths")],
)
def test_logits_check_their_shapes(tokens, lengths, argument):
    with pytest.raises(InputError, match=f"^{argument}' shape is "):
        logits(tiny.MODEL, tiny.params(), tokens, lengths)
