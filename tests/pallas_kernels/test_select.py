import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import pool_scores, select_top_k
from pallas_kernels.dispatch import has_mosaic_gpu, lacks
from pallas_kernels.select import bisect

IMPLEMENTATIONS = [name for name in ("mosaic_gpu", "xla", "reference") if lacks(name) is None]

# Leading axes, M, max_k.
CASES = [((3,), 1, 1), ((2,), 5, 9), ((2, 1, 2), 64, 64), ((4,), 100, 13), ((), 33, 8)]
FEW_VALUES = [np.nan, -np.inf, np.inf, -0.0, 0.0, 1e-45, -1e-45, 1.0, -1.0, 3e38, -3e38]


@functools.cache
def compiled(max_k, kernels):
    return jax.jit(functools.partial(select_top_k, max_k=max_k, kernels=kernels))


def top_k_by_sorting(scores, k, max_k):
    """The definition again, a row at a time in Python."""
    scores = [0.0 if abs(x) < np.finfo(np.float32).tiny else float(x) for x in scores]
    candidates = (i for i, x in enumerate(scores) if x > -np.inf)
    order = sorted(candidates, key=lambda i: (-scores[i], i))
    return sorted(order[: max(0, min(k, max_k))])


@pytest.mark.parametrize(("lead", "size", "max_k"), CASES)
@settings(max_examples=25)
@given(data=st.data())
def test_is_the_exact_set_in_order(lead, size, max_k, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    if data.draw(st.booleans()):
        scores = rng.choice(np.array(FEW_VALUES, np.float32), (*lead, size))  # ties
    else:
        scores = rng.normal(size=(*lead, size)).astype(np.float32)
    k = rng.integers(-1, size + 3, lead).astype(np.int32)
    k = np.asarray(data.draw(st.sampled_from([k, np.zeros_like(k), np.full_like(k, size + 5)])))

    for kernels in IMPLEMENTATIONS:
        positions, counts = compiled(max_k, kernels)(scores, k)
        assert positions.dtype == counts.dtype == jnp.int32
        assert positions.shape == (*lead, max_k)
        assert counts.shape == lead
        for row in np.ndindex(*lead):
            expected = top_k_by_sorting(scores[row], k[row], max_k)
            assert counts[row] == len(expected)
            padded = expected + [0] * (max_k - len(expected))
            np.testing.assert_array_equal(positions[row], padded, kernels)


@functools.partial(jax.jit, static_argnames="thresholds")
def bisected(scores, k, thresholds):
    """A mask of k scores, by the two bisections."""

    def counts_from(numbers, step):
        assert len(numbers) == thresholds
        return [(scores >= x).sum(dtype=jnp.int32) for x in numbers]

    def counts_before(ends, step):
        assert len(ends) == thresholds
        return [(order < x).sum(dtype=jnp.int32) for x in ends]

    score, k, reached, step = bisect.bisect_scores(counts_from, k, thresholds)
    order = jnp.where(scores == score, jnp.arange(len(scores)) + 1, len(scores) + 1)
    order = jnp.where(scores > score, 0, order)
    end, step = bisect.bisect_order(counts_before, len(scores) + 1, k, reached, step, thresholds)
    return order < end, k, step


# The first step, those for the bits of a float32, those for the bits of a position.
@pytest.mark.parametrize(("thresholds", "most_steps"), [(1, 1 + 32 + 6), (3, 1 + 16 + 3)])
@settings(max_examples=50)
@given(data=st.data())
def test_bisects_for_the_exact_set(thresholds, most_steps, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    normals = [x for x in FEW_VALUES if not 0 < abs(x) < np.finfo(np.float32).tiny]
    spread = data.draw(st.sampled_from([0, 1, 30]))
    scores = np.exp(spread * rng.normal(size=64)) * rng.choice(normals, 64)
    with np.errstate(over="ignore", under="ignore"):
        scores = scores.astype(np.float32)
    scores[np.abs(scores) < np.finfo(np.float32).tiny] = 0.0
    k = data.draw(st.sampled_from([0, 1, 13, 63, 64, 70]))

    mask, count, step = bisected(scores, np.int32(k), thresholds)
    expected = top_k_by_sorting(scores, k, 64)
    np.testing.assert_array_equal(np.flatnonzero(mask), expected)
    assert count == len(expected)
    assert step <= most_steps


@pytest.mark.skipif(not has_mosaic_gpu(), reason="needs the Mosaic GPU interface")
@pytest.mark.parametrize("shape", [(0, 8), (2, 2**18 + 1)])
def test_the_hopper_kernel_names_what_it_refuses(shape):
    from pallas_kernels.select import mosaic_sm90

    scores = jax.ShapeDtypeStruct(shape, jnp.float32)
    assert mosaic_sm90.refuses(scores, None, 4).startswith("`scores` must ")


@pytest.mark.parametrize("kernels", [name for name in IMPLEMENTATIONS if name != "reference"])
def test_repeats_bit_for_bit_at_a_real_size(kernels):
    scores = np.random.default_rng(0).normal(size=(8, 1, 4096)).astype(np.float32).round(2)
    k = np.full((8, 1), 280, np.int32)
    first, again = (compiled(287, kernels)(scores, k) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    expected = compiled(287, "reference")(scores, k)
    jax.tree.map(np.testing.assert_array_equal, first, expected)


def test_takes_bfloat16():
    scores = jnp.array([[1.0, 3.0, 2.0]], jnp.bfloat16)
    positions, counts = select_top_k(scores, jnp.array([2]), max_k=3)
    np.testing.assert_array_equal(positions, [[1, 2, 0]])
    np.testing.assert_array_equal(counts, [2])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("kernels", {"kernels": "cuda"}),
        ("scores", {"scores": jnp.zeros((2, 8), jnp.int32)}),
        ("k", {"k": jnp.zeros((), jnp.int32)}),
        ("k", {"k": jnp.zeros((2,), jnp.float32)}),
        ("max_k", {"max_k": 0}),
    ],
)
def test_refuses_and_names_the_argument(name, change):
    arguments = {"scores": jnp.zeros((2, 8)), "k": jnp.zeros((2,), jnp.int32), "max_k": 4}
    with pytest.raises(ValueError, match=f"^`{name}` .*[.]$"):
        select_top_k(**arguments | change)


def pooled_by_loops(scores, ranked_length, pool, block_size):
    """The definition in float64, a position at a time."""
    back, ahead = pool
    num_blocks = -(-len(scores) // block_size)
    blocks = np.full(num_blocks, -np.inf)
    smooth = np.zeros(ranked_length)
    for i in range(ranked_length):
        smooth[i] = scores[max(0, i - ahead) : min(ranked_length, i + back + 1)].mean()
    for j in range(ranked_length // block_size):
        blocks[j] = smooth[j * block_size : (j + 1) * block_size].mean()
    return blocks


@pytest.mark.parametrize(
    ("size", "pool", "block_size"),
    [
        (40, (0, 0), 1),
        (40, (0, 7), 1),
        (48, (0, 7), 16),
        (45, (3, 2), 8),
        (33, (1, 0), 1),
        (24, (30, 50), 8),
    ],
)
@settings(max_examples=15)
@given(data=st.data())
def test_pools_only_what_is_ranked(size, pool, block_size, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    scores = np.exp(4 * rng.normal(size=(3, 2, size))).astype(np.float32)
    ranked = st.integers(0, size // block_size)
    ranked = np.array([data.draw(ranked) * block_size for _ in range(2)], np.int32)
    for i in range(2):
        scores[:, i, ranked[i] :] = data.draw(st.sampled_from([0.0, np.nan, np.inf, 1e30]))

    run = compiled_pool(pool, block_size)
    actual = run(scores, ranked)
    assert actual.dtype == jnp.float32
    for layer, i in np.ndindex(3, 2):
        row = scores[layer, i].astype(np.float64)
        expected = pooled_by_loops(row, ranked[i], pool, block_size)
        np.testing.assert_allclose(actual[layer, i], expected, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, run(scores, ranked), actual)


@functools.cache
def compiled_pool(pool, block_size):
    return jax.jit(functools.partial(pool_scores, pool=pool, block_size=block_size))


def test_looking_ahead_moves_scores_to_the_keys_that_follow():
    scores = np.zeros(16, np.float32)
    scores[4] = 8.0
    actual = pool_scores(scores, np.int32(16), pool=(0, 3), block_size=1)
    np.testing.assert_allclose(actual, np.where((np.arange(16) // 4) == 1, 2.0, 0.0))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("scores", {"scores": jnp.zeros((), jnp.float32)}),
        ("ranked_length", {"ranked_length": jnp.zeros((2,), jnp.float32)}),
        ("pool", {"pool": (0, -1)}),
        ("block_size", {"block_size": 0}),
    ],
)
def test_pool_scores_refuses_and_names_the_argument(name, change):
    arguments = {
        "scores": jnp.zeros((2, 8)),
        "ranked_length": jnp.zeros((2,), jnp.int32),
        "pool": (0, 7),
        "block_size": 8,
    }
    with pytest.raises(ValueError, match=f"^`{name}` .*[.]$"):
        pool_scores(**arguments | change)
