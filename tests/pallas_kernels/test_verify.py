import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import verify_attention
from pallas_kernels.verify import reference, xla
from pallas_kernels.verify.key_scores import KeyScores
from tests.pallas_kernels.arrays import (
    MAGNITUDES,
    POISONS,
    SEEDS,
    TOLERANCE,
    assert_close,
    logit_noise,
    random_attention,
)

# Query batch, cache batch, T, S, K, G, D, chunk, dtype, scores.
CASES = [
    (2, 2, 1, 40, 2, 4, 16, 16, "float32", "last"),
    (3, 3, 7, 50, 2, 1, 64, 16, "float32", "first+last"),
    (1, 1, 16, 33, 1, 8, 128, 32, "float32", "all"),
    (2, 2, 5, 37, 3, 2, 16, None, "float32", "each"),
    (1, 3, 12, 48, 2, 3, 16, 16, "float32", "last"),  # prefill of one slot
    (2, 2, 7, 45, 2, 4, 64, 16, "bfloat16", "first+last"),
    (2, 3, 3, 45, 2, 4, 16, 16, "bfloat16", None),
    (2, 2, 4, 45, 2, 4, 64, 16, "float16", "all"),
]


@functools.cache
def compiled(implementation, key_scores, scale, chunk):
    extra = {} if chunk is None else {"chunk": chunk}
    return jax.jit(
        lambda q, k, v, lengths, slots: implementation(
            q, k, v, lengths, slots, key_scores, scale, **extra
        )
    )


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=8)
@given(data=st.data())
def test_agrees_with_reference_whatever_lies_past_the_valid_rows(case, data):
    batch, cache_batch, tokens, rows, kv_heads, group, head_dim, chunk, dtype, scores = case
    magnitude = data.draw(MAGNITUDES) if dtype == "float32" else 1.0
    mode, per_kv_head = ("weight", False) if magnitude != 1.0 else ("logit", True)
    shape = (batch, cache_batch, tokens, rows, kv_heads, group, head_dim)
    q, k, v = random_attention(data.draw(SEEDS), *shape, magnitude)
    length = st.sampled_from([0, 1, 15, 16, rows - tokens - 1, rows - tokens])
    lengths = np.array(data.draw(st.lists(length, min_size=batch, max_size=batch)), np.int32)
    slots = None
    if cache_batch != batch:
        slots = np.array(data.draw(st.permutations(range(cache_batch)))[:batch], np.int32)

    poisoned_k, poisoned_v = k.copy(), v.copy()
    for i, length in enumerate(lengths):
        slot = i if slots is None else slots[i]
        for x in (poisoned_k, poisoned_v):
            x[slot, :, length + tokens :] = data.draw(POISONS)
    q, k, v, poisoned_k, poisoned_v = (
        jnp.asarray(x).astype(dtype) for x in (q, k, v, poisoned_k, poisoned_v)
    )
    key_scores = None if scores is None else KeyScores.of(scores, tokens, mode, per_kv_head)
    run = compiled(xla.verify_attention, key_scores, head_dim**-0.5, chunk)
    expect = compiled(reference.verify_attention, key_scores, head_dim**-0.5, None)
    actual = run(q, poisoned_k, poisoned_v, lengths, slots)
    expected = expect(q, k, v, lengths, slots)

    tolerance = TOLERANCE[dtype] * logit_noise(magnitude, dtype)
    assert actual[0].dtype == q.dtype
    assert actual[1].dtype == jnp.float32
    assert_close(actual[0], expected[0], tolerance, "out")
    assert_close(actual[1], expected[1], 5e-6, "lse")
    if scores is None:
        assert actual[2] is None
    else:
        assert_close(actual[2], expected[2], 5e-6 * logit_noise(magnitude, dtype), "scores")
    again = run(q, poisoned_k, poisoned_v, lengths, slots)
    jax.tree.map(np.testing.assert_array_equal, again, actual)
    clean = run(q, k, v, lengths, slots)
    jax.tree.map(np.testing.assert_array_equal, clean, actual)


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
def test_scores_are_means_over_rows_and_heads(scores, mode, per_kv_head):
    batch, tokens, rows, kv_heads, group, head_dim = 2, 4, 24, 2, 3, 16
    q, k, v = random_attention(1, batch, batch, tokens, rows, kv_heads, group, head_dim, 1.0)
    lengths = np.array([7, rows - tokens], np.int32)
    settings = {"scores": scores, "score_mode": mode, "per_kv_head": per_kv_head}
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
                found[i, h // group, h % group, : lengths[b] + 1] = value[: lengths[b] + 1]
        found = found.mean(axis=2)
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
