import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import verify_attention
from pallas_kernels.verify import api
from tests.pallas_kernels.arrays import MAGNITUDES, POISONS, SEEDS, assert_close, random_attention
from tests.pallas_kernels.cases import VerifyCase as Case
from tests.pallas_kernels.cases import (
    assert_attention,
    assert_same,
    assert_scores,
    compiled_verify,
    for_each_implementation,
    verify_reference_of,
)

CASES = [
    Case(2, 2, 1, 40, 2, 4, 16, "float32", "last", chunk=16),
    Case(3, 3, 7, 50, 2, 1, 64, "float32", "first+last", chunk=16),
    Case(1, 1, 16, 33, 1, 8, 128, "float32", "all", chunk=32),
    Case(2, 2, 5, 37, 3, 2, 16, "float32", "each"),
    Case(1, 3, 12, 48, 2, 3, 16, "float32", "last", chunk=16),  # prefill of one slot
    Case(2, 2, 7, 45, 2, 4, 64, "bfloat16", "first+last", "logit", True, chunk=16),
    Case(2, 3, 3, 45, 2, 4, 16, "bfloat16", chunk=16),
    Case(2, 2, 4, 45, 2, 4, 64, "float16", "all", "logit", True, chunk=16),
    Case(2, 2, 7, 48, 2, 2, 16, "float32", window=9, sinks=True, chunk=16),
    Case(2, 2, 3, 40, 1, 2, 16, "float32", window=100, chunk=16),  # longer than the cache
    Case(1, 2, 2, 40, 1, 3, 16, "float32", "all", "weight", sinks=True, chunk=16),
    Case(2, 2, 3, 45, 1, 2, 16, "float32", "each", "logit", block=5, chunk=17),
    Case(2, 2, 2, 48, 2, 2, 16, "float32", "first+last", "weight", block=24, chunk=16),
]
# What the kernels take: 16 bits, head_dim 64 or 128, a multiple of 64 rows.
KERNEL_CASES = [
    Case(3, 3, 7, 192, 2, 4, 128, "bfloat16", "first+last", "logit"),
    Case(2, 2, 1, 128, 2, 4, 64, "bfloat16", "last", "weight", block=16),
    Case(2, 3, 16, 320, 2, 8, 64, "float16", "all", "weight", block=8),
    Case(2, 2, 16, 192, 1, 8, 128, "bfloat16", "each", "weight", per_kv_head=True, sinks=True),
    Case(2, 2, 7, 256, 1, 5, 64, "bfloat16", window=70, sinks=True),
]


@pytest.mark.parametrize(
    ("name", "case"), for_each_implementation(api.IMPLEMENTATIONS, CASES + KERNEL_CASES)
)
@settings(max_examples=8)
@given(data=st.data())
def test_agrees_with_reference_whatever_lies_past_the_valid_rows(name, case, data):
    magnitude = data.draw(MAGNITUDES)
    mode = case.mode or ("logit" if magnitude == 1.0 else "weight")
    longest = case.rows - case.tokens
    length = st.sampled_from(
        [x for x in (0, 1, 15, 16, 63, 64, longest - 1, longest) if x <= longest]
    )
    lengths = data.draw(st.lists(length, min_size=case.batch, max_size=case.batch))
    slots = None
    if case.cache_batch != case.batch:
        slots = data.draw(st.permutations(range(case.cache_batch)))[: case.batch]
    clean, poisoned = case.arrays(data.draw(SEEDS), magnitude, lengths, slots, data.draw(POISONS))

    extra = {} if name != "xla" or case.chunk is None else {"chunk": case.chunk}
    run = compiled_verify(api.IMPLEMENTATIONS[name].run, case.statics(mode), **extra)
    actual = run(*poisoned)
    expected = verify_reference_of(case, mode)(*clean)
    assert_attention(actual, expected, case, magnitude)
    assert_scores(actual[2], expected[2], case.key_scores(mode), name, magnitude)
    assert_same(run(*poisoned), actual)
    assert_same(run(*clean), actual)


@pytest.mark.parametrize("case", KERNEL_CASES)
def test_the_hopper_kernel_takes_its_cases(case):
    assert case.taken_by("mosaic_gpu")


@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("sinks", [None, [0.5, -np.inf, 30.0, -2.0]])
def test_attends_to_a_window_and_sinks(window, sinks):
    batch, tokens, rows, kv_heads, group, head_dim = 2, 3, 16, 2, 2, 16
    q, k, v = random_attention(5, batch, batch, tokens, rows, kv_heads, group, head_dim, 1.0)
    lengths = np.array([0, 11], np.int32)
    sinks = None if sinks is None else np.array(sinks, np.float32)
    settings = {"window": window, "sinks": sinks}
    actual = [
        jax.jit(functools.partial(verify_attention, **settings, kernels=kernels))(q, k, v, lengths)
        for kernels in ("xla", "reference")
    ]

    out, lse = np.zeros(q.shape), np.zeros(q.shape[:3])
    for b, t, h in np.ndindex(*lse.shape):
        end = lengths[b] + t + 1
        seen = slice(0 if window is None else max(0, end - window), end)
        weights = np.exp(k[b, h // group, seen].astype(np.float64) @ q[b, t, h] / 4)
        total = weights.sum() + (0 if sinks is None else np.exp(sinks[h]))
        out[b, t, h] = weights @ v[b, h // group, seen] / total
        lse[b, t, h] = np.log(total)
    for result in actual:
        assert_close(result[0], out, 2e-6)
        assert_close(result[1], lse, 2e-6)


@pytest.mark.parametrize(
    ("scores", "mode", "per_kv_head"),
    [
        ("first+last", "weight", False),
        ("first+last", "logit", True),
        ("last", "weight", True),
        ("last", "logit", False),
        ("all", "weight", False),
        ("all", "logit", True),
        ("each", "weight", True),
        ("each", "logit", True),
        ("each", "logit", False),
    ],
)
@pytest.mark.parametrize("block", [1, 4])
def test_scores_are_means_over_rows_and_heads(scores, mode, per_kv_head, block):
    batch, tokens, rows, kv_heads, group, head_dim = 2, 4, 24, 2, 3, 16
    q, k, v = random_attention(1, batch, batch, tokens, rows, kv_heads, group, head_dim, 1.0)
    lengths = np.array([7, rows - tokens], np.int32)
    settings = {"scores": scores, "score_mode": mode, "per_kv_head": per_kv_head}
    settings["score_block"] = block
    actual = [
        jax.jit(functools.partial(verify_attention, **settings, kernels=kernels))(q, k, v, lengths)
        for kernels in ("xla", "reference")
    ]

    chosen = {"first+last": [0, 3], "last": [3]}.get(scores, [0, 1, 2, 3])
    expected = []
    for b in range(batch):
        found = np.zeros((len(chosen), kv_heads, group, rows), np.float32)
        for i, t in enumerate(chosen):
            for h in range(kv_heads * group):
                keys = k[b, h // group, : lengths[b] + t + 1]
                logits = keys @ q[b, t, h] / np.sqrt(head_dim)
                value = logits
                if mode == "weight":
                    value = np.exp(logits - logits.max())
                    value /= value.sum()
                scored = (lengths[b] + 1) // block * block  # whole blocks that every query sees
                found[i, h // group, h % group, :scored] = value[:scored]
        found = found.reshape(*found.shape[:-1], -1, block).mean(axis=(2, 4))
        found = found if per_kv_head else found.mean(axis=1)
        expected.append(found if scores == "each" else found.mean(axis=0))
    for _, _, key_scores in actual:
        assert_close(key_scores, np.stack(expected), 2e-6)


def test_one_token_counts_once():
    q, k, v = random_attention(2, 1, 1, 1, 16, 1, 2, 16, 1.0)
    lengths = np.array([9], np.int32)
    run = jax.jit(verify_attention, static_argnames="scores")
    both, last = (run(q, k, v, lengths, scores=scores)[2] for scores in ("first+last", "last"))
    np.testing.assert_array_equal(both, last)
    np.testing.assert_allclose(both.sum(), 1.0, rtol=1e-6)


def test_scale():
    q, k, v = random_attention(3, 1, 1, 2, 16, 1, 2, 16, 1.0)
    lengths = np.array([9], np.int32)
    run = jax.jit(verify_attention, static_argnames=("scale", "kernels"))
    out = run(q, k, v, lengths, scale=0.5)[0]
    expected = run(2 * q, k, v, lengths, scale=0.25, kernels="reference")[0]
    assert_close(out, expected, 2e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("slots", [False, True])
def test_does_not_copy_the_cache(dtype, slots):
    q = jax.ShapeDtypeStruct((1, 7, 4, 64), dtype)
    cache = jax.ShapeDtypeStruct((1, 2, 2**16, 64), dtype)
    index = jax.ShapeDtypeStruct((1,), "int32")

    @jax.jit
    def run(q, k, v, lengths, slot):
        extra = {"slots": slot} if slots else {}
        return verify_attention(q, k, v, lengths, scores="first+last", score_mode="logit", **extra)

    memory = run.lower(q, cache, cache, index, index).compile().memory_analysis()
    assert memory.temp_size_in_bytes < cache.size * cache.dtype.itemsize / 4


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("kernels", {"kernels": "cuda"}),
        ("scores", {"scores": "middle"}),
        ("score_mode", {"score_mode": "rank"}),
        ("score_block", {"scores": "all", "score_block": 5}),
        ("score_block", {"scores": "all", "score_block": 0}),
        ("scores", {"scores": "all", "window": 4}),
        ("window", {"window": 0}),
        ("sinks", {"sinks": jnp.zeros((2,))}),
        ("lengths", {"lengths": jnp.zeros((3,), jnp.int32)}),
        ("lengths", {"lengths": jnp.zeros((2,), jnp.float32)}),
        ("slots", {"slots": jnp.zeros((1,), jnp.int32)}),
        ("slots", {"slots": jnp.zeros((2,), jnp.float32)}),
        ("q", {"q": jnp.zeros((1, 3, 4, 16))}),
        ("q", {"q": jnp.zeros((2, 3, 5, 16))}),
        ("q", {"q": jnp.zeros((2, 30, 4, 16))}),
        ("q", {"q": jnp.zeros((2, 3, 64))}),
        ("k", {"q": jnp.zeros((2, 3, 4, 8))}),
        ("k", {"q": jnp.zeros((2, 3, 4, 16), jnp.bfloat16)}),
        ("v", {"v": jnp.zeros((2, 2, 25, 16))}),
    ],
)
def test_refuses_and_names_the_argument(name, change):
    arguments = {
        "q": jnp.zeros((2, 3, 4, 16)),
        "k": jnp.zeros((2, 2, 24, 16)),
        "v": jnp.zeros((2, 2, 24, 16)),
        "lengths": jnp.zeros((2,), jnp.int32),
    }
    with pytest.raises(ValueError, match=f"^`{name}` .*[.]$"):
        verify_attention(**arguments | change)


def test_a_sequence_is_the_same_whatever_its_batch():
    q, k, v = random_attention(4, 3, 3, 7, 4500, 2, 2, 16, 1.0)
    lengths = np.array([40, 4493, 2100], np.int32)
    run = jax.jit(functools.partial(verify_attention, scores="first+last"))
    together = run(q, k, v, lengths)
    for i in range(3):
        row = slice(i, i + 1)
        alone = run(q[row], k[row], v[row], lengths[row])
        # The chunks and their order are the same; within one, XLA's product may sum otherwise for
        # another batch size (jax 0.11.2 on a CPU does, in the last bit).
        for one, several in zip(alone, together, strict=True):
            np.testing.assert_allclose(one[0], several[i], rtol=2e-6, atol=1e-7)
