"""Random inputs and comparisons for the attention ops."""

import numpy as np
from hypothesis import strategies as st

POISONS = st.sampled_from([np.nan, np.inf, -np.inf, 1e4])
MAGNITUDES = st.sampled_from([1e-3, 1.0, 100.0])  # of q: logits of about the same size
SEEDS = st.integers(0, 2**16)

# Largest error of an attention output whose values are about 1, where logits are about 1: float32
# differs in the order of sums; otherwise P is rounded to the dtype (8 or 11 bits), and so is `out`.
TOLERANCE = {"float32": 5e-6, "bfloat16": 3e-2, "float16": 4e-3}


def random_attention(seed, batch, cache_batch, tokens, rows, kv_heads, group, head_dim, magnitude):
    """q [b, T, H, D], k and v [B, K, S, D] in float32."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(batch, tokens, kv_heads * group, head_dim)) * magnitude
    k, v = rng.normal(size=(2, cache_batch, kv_heads, rows, head_dim))
    return tuple(x.astype(np.float32) for x in (q, k, v))


def assert_close(actual, expected, tolerance, name=""):
    """Compares to within `tolerance` times the largest expected magnitude, or 1."""
    actual, expected = (np.asarray(x, np.float32) for x in (actual, expected))
    assert actual.shape == expected.shape, name
    infinite = np.isinf(expected)
    np.testing.assert_array_equal(actual[infinite], expected[infinite], name)
    expected, actual = expected[~infinite], actual[~infinite]
    size = max(1.0, np.abs(expected).max(initial=0.0))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * size, err_msg=name)


def logit_noise(magnitude, dtype):
    """How much more than TOLERANCE to allow: an error in a logit is one of its weight."""
    return max(1.0, magnitude) if dtype == "float32" else 1.0
