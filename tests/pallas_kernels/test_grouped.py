"""Products of rows with the matrix of their group."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import MXFP4, grouped_matmul
from pallas_kernels.grouped import dequantize
from pallas_kernels.grouped.xla import block_rows, by_ragged_dot


def arrays(sizes, inputs=32, outputs=24, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(sum(sizes), inputs)).astype(np.float32)
    weights = rng.normal(size=(len(sizes), inputs, outputs)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(weights), jnp.asarray(sizes, jnp.int32)


def packed(groups, inputs, outputs, seed=0):
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (groups, outputs, inputs // 32, 16), np.uint8)
    scales = rng.integers(120, 130, (groups, outputs, inputs // 32), np.uint8)
    return MXFP4(jnp.asarray(blocks), jnp.asarray(scales))


@settings(max_examples=8, deadline=None)  # each compiles two programs
@given(sizes=st.lists(st.sampled_from([0, 1, 2, 5, 40]), min_size=1, max_size=6))
def test_is_each_groups_rows_by_its_matrix(sizes):
    if not sum(sizes):
        sizes = [*sizes, 1]
    x, weights, sizes_array = arrays(sizes)
    found = grouped_matmul(x, weights, sizes_array, kernels="xla")
    start = 0
    for size, matrix in zip(sizes, weights, strict=True):
        rows = np.asarray(x[start : start + size], np.float64)
        expected = rows @ np.asarray(matrix, np.float64)
        np.testing.assert_allclose(found[start : start + size], expected, atol=2e-5)
        start += size
    reference = grouped_matmul(x, weights, sizes_array, kernels="reference")
    np.testing.assert_allclose(found, reference, atol=2e-5)


def test_one_expert_may_take_all_rows_and_groups_may_change_without_recompiling():
    x, weights, _ = arrays([0, 300, 0, 0])
    run = jax.jit(lambda sizes: grouped_matmul(x, weights, sizes))
    for sizes in ([0, 300, 0, 0], [300, 0, 0, 0], [75, 75, 75, 75], [1, 2, 3, 294]):
        found = run(jnp.asarray(sizes, jnp.int32))
        group = np.repeat(np.arange(4), sizes)
        expected = np.einsum("mk,mkn->mn", np.asarray(x, np.float64), np.asarray(weights)[group])
        np.testing.assert_allclose(found, expected, atol=2e-5)
    assert run._cache_size() == 1


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_numpy_arrays_are_arrays(kernels):
    x, weights, sizes = arrays([3, 0, 4])
    for matrices in (weights, packed(3, 32, 24)):
        expected = grouped_matmul(x, matrices, sizes, kernels=kernels)
        given = jax.tree.map(np.asarray, (x, matrices, sizes))
        np.testing.assert_array_equal(grouped_matmul(*given, kernels=kernels), expected)


def test_groups_without_rows_are_not_read():
    x, weights, sizes = arrays([3, 0, 4])
    poisoned = weights.at[1].set(jnp.nan)
    found = grouped_matmul(x, poisoned, sizes)
    np.testing.assert_array_equal(found, grouped_matmul(x, weights, sizes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_matrices_are_the_dequantised_ones(dtype):
    x, _, sizes = arrays([2, 0, 5], inputs=64)
    weights = packed(3, 64, 24)
    wide = dequantize(weights, jnp.dtype(dtype))
    assert wide.shape == (3, 64, 24)
    found = grouped_matmul(x.astype(dtype), weights, sizes)
    expected = grouped_matmul(x.astype(dtype), wide, sizes)
    # Sums of 64 products in another order, relative to their terms (up to 6 * 2**3).
    tolerance = {"float32": 1e-4, "bfloat16": 2.0}[dtype]
    np.testing.assert_allclose(*(y.astype(jnp.float32) for y in (found, expected)), atol=tolerance)


@pytest.mark.parametrize("sizes", [[3, 0, 4], [0, 0, 7], [7, 0, 0]])
def test_accelerators_without_a_kernel_multiply_the_same(sizes):
    x, weights, sizes_array = arrays(sizes, inputs=64)
    for matrices in (weights, packed(3, 64, 24)):
        found = by_ragged_dot(x, matrices, sizes_array)
        expected = grouped_matmul(x, matrices, sizes_array, kernels="reference")
        np.testing.assert_allclose(found, expected, atol=1e-4)  # terms are up to 6 * 2**3


def test_four_bits_are_those_of_the_standard():
    """Against ml_dtypes' float4_e2m1fn, and with the first weight in the low bits."""
    codes = np.arange(16, dtype=np.uint8)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    first, second = np.tile(values, 2)[::2], np.tile(values, 2)[1::2]
    blocks = (np.tile(codes, 2)[::2] | np.tile(codes, 2)[1::2] << 4).astype(np.uint8)
    scales = jnp.full((1, 1, 1), 128, jnp.uint8)
    weights = dequantize(MXFP4(jnp.asarray(blocks)[None, None, None], scales), jnp.dtype("float32"))
    np.testing.assert_array_equal(weights[0, 0::2, 0], 2 * first)
    np.testing.assert_array_equal(weights[0, 1::2, 0], 2 * second)


def test_blocks_have_about_as_many_rows_as_groups():
    assert [block_rows(*size) for size in ((2, 8), (16, 8), (100, 8), (10_000, 8))] == [
        1,
        2,
        16,
        128,
    ]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"x": jnp.zeros((4, 5, 6))}, "`x`"),
        ({"x": jnp.zeros((7, 32), jnp.int32)}, "`x`"),
        ({"weights": jnp.zeros((3, 31, 24))}, "`weights`"),
        ({"weights": jnp.zeros((3, 32, 24), jnp.bfloat16)}, "`weights`"),
        ({"weights": packed(3, 64, 24)}, "`weights.scales`"),
        ({"weights": packed(3, 32, 24)._replace(blocks=jnp.zeros((3, 24, 1, 16)))}, "`weights.bl"),
        ({"weights": jnp.zeros((0, 32, 24)), "sizes": jnp.zeros(0, jnp.int32)}, "`weights`"),
        ({"weights": MXFP4([1], [2])}, "`weights.blocks` must be an array"),
        ({"weights": MXFP4(jnp.zeros(2), jnp.zeros((3, 24)))}, "`weights.scales`"),
        ({"sizes": jnp.zeros(2, jnp.int32)}, "`sizes`"),
        ({"sizes": jnp.zeros(3)}, "`sizes`"),
        ({"kernels": "triton"}, "`kernels`"),
    ],
)
def test_bad_arguments_are_named(change, name):
    x, weights, sizes = arrays([3, 0, 4])
    arguments = {"x": x, "weights": weights, "sizes": sizes, "kernels": "auto"} | change
    kernels = arguments.pop("kernels")
    with pytest.raises(ValueError, match=name):
        grouped_matmul(*arguments.values(), kernels=kernels)
