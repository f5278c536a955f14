"""The Triton kernels' arithmetic, in Triton's interpreter, against each op's reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    dispatch,
    grouped_matmul,
    select_top_k,
    sparse_attention,
    verify_attention,
)
from pallas_kernels.grouped import triton as grouped_triton
from pallas_kernels.select import triton as select_triton
from pallas_kernels.sparse import triton as sparse_triton
from pallas_kernels.verify import triton as verify_triton
from tests.pallas_kernels import triton_interpreter
from tests.pallas_kernels.arrays import TOLERANCE, assert_close, random_attention
from tests.pallas_kernels.test_grouped import packed

POISON = [np.nan, np.inf, -np.inf, 1e4]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    for module in (grouped_triton, select_triton, sparse_triton, verify_triton):
        monkeypatch.setattr(module, "launch", triton_interpreter.launch)
    monkeypatch.setattr(dispatch, "lacks", lambda kernels: None)


def both(op, arguments, **settings):
    """What the kernel and the reference make of the arguments."""
    return [
        jax.jit(lambda *arrays, name=name: op(*arrays, **settings, kernels=name))(*arguments)
        for name in ("triton", "reference")
    ]


# T, S, K, G, D, lengths, slots, settings.
VERIFY = [
    (1, 140, 2, 4, 64, [0, 139], None, {}),
    (5, 200, 1, 2, 128, [64, 195], [2, 0], {"scores": "all", "score_mode": "logit"}),
    (4, 130, 2, 3, 64, [126, 3], None, {"scores": "each", "score_mode": "logit"}),
    (7, 192, 2, 4, 64, [0, 100], None, {"scores": "first+last", "score_block": 16}),
    (3, 144, 2, 1, 64, [141, 62], None, {"scores": "last", "score_block": 12}),
    (9, 131, 1, 8, 64, [1, 122], [0, 1], {"scores": "each", "per_kv_head": True}),
    (2, 256, 2, 2, 64, [254, 127], None, {"scores": "first+last", "score_block": 128}),
    (4, 300, 1, 2, 64, [296, 7], None, {"window": 100}),
    (4, 300, 1, 2, 64, [296, 0], None, {"window": 1}),
]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("case", VERIFY)
def test_verifies(case, sinks):
    tokens, rows, kv_heads, group, head_dim, lengths, slots, settings = case
    batch, cache_batch = len(lengths), 2 if slots is None else 3
    q, k, v = random_attention(
        rows, batch, cache_batch, tokens, rows, kv_heads, group, head_dim, 1.0
    )
    k, v = k.astype(np.float16), v.astype(np.float16)
    for i, length in enumerate(lengths):
        slot = i if slots is None else slots[i]
        k[slot, :, length + tokens :], v[slot, :, length + tokens :] = POISON[i], POISON[i]
    arguments = (q.astype(np.float16), k, v, np.array(lengths, np.int32))
    settings = dict(settings, slots=None if slots is None else np.array(slots, np.int32))
    if sinks:
        settings["sinks"] = np.linspace(-1, 4, kv_heads * group, dtype=np.float32)
    actual, expected = both(verify_attention, arguments, **settings)
    assert_close(actual[0], expected[0], TOLERANCE["float16"], "out")
    assert_close(actual[1], expected[1], 5e-6, "lse")
    if "scores" in settings:
        assert_close(actual[2], expected[2], 5e-6, "scores")
    else:
        assert actual[2] is None


# T, S, K, G, D, block size, N, lengths, tail_start, counts, a list per KV head.
SPARSE = [
    (1, 320, 2, 4, 64, 1, 150, [319, 0], [256, 0], [150, 0], False),
    (1, 320, 2, 2, 64, 1, 100, [200, 9], [120, 7], [97, 3], True),
    (7, 192, 1, 8, 64, 16, 6, [185, 40], [96, 40], [6, 1], False),
    (2, 144, 2, 1, 128, 12, 9, [140, 100], [140, 30], [9, 2], True),
    (3, 256, 1, 2, 64, 128, 2, [253, 128], [130, 128], [1, 1], False),
    (3, 256, 1, 2, 64, 8, 0, [253, 0], [190, 0], [0, 0], False),
]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("case", SPARSE)
def test_attends_to_what_is_listed(case, sinks):
    tokens, rows, kv_heads, group, head_dim, block, size, lengths, start, counts, per_head = case
    batch, lists = len(lengths), kv_heads if per_head else 1
    rng = np.random.default_rng(rows)
    q, k, v = random_attention(1, batch, batch, tokens, rows, kv_heads, group, head_dim, 1.0)
    blocks = rng.integers(-(2**31), 2**31, (batch, lists, size)).astype(np.int32)
    seen = np.zeros((batch, kv_heads, rows), bool)
    for i in range(batch):
        seen[i, :, start[i] : lengths[i] + tokens] = True
        for head in range(lists):
            listed = rng.choice(start[i] // block, counts[i], replace=False)
            blocks[i, head, : counts[i]] = listed
            below = np.isin(np.arange(rows) // block, listed)
            seen[i, head if per_head else slice(None)] |= below
    k, v = (np.where(seen[..., None], x, rng.choice(POISON)).astype(np.float16) for x in (k, v))
    arguments = [q.astype(np.float16), k, v, blocks if per_head else blocks[:, 0]]
    arguments += [np.array(x, np.int32) for x in (counts, lengths)]
    settings = {"block_size": block, "tail_start": np.array(start, np.int32), "max_tail": 128}
    if sinks:
        settings["sinks"] = np.linspace(-1, 4, kv_heads * group, dtype=np.float32)
    actual, expected = both(sparse_attention, arguments, **settings)
    assert_close(actual[0], expected[0], TOLERANCE["float16"], "out")
    assert_close(actual[1], expected[1], 5e-6, "lse")


FEW_VALUES = [np.nan, -np.inf, np.inf, -0.0, 0.0, 1e-45, -1e-45, 1.0, -1.0, 3e38, -3e38]


@pytest.mark.parametrize(
    ("lead", "size", "max_k"), [((3,), 1, 1), ((2, 2), 5, 9), ((8,), 300, 40), ((), 33, 33)]
)
@pytest.mark.parametrize("kind", ["few", "normal", "bits"])
def test_selects(monkeypatch, lead, size, max_k, kind):
    monkeypatch.setattr(select_triton, "MAX_CHUNK", 128)
    rng = np.random.default_rng(size)
    scores = {
        "few": rng.choice(np.array(FEW_VALUES, np.float32), (*lead, size)),
        "normal": rng.normal(size=(*lead, size)).astype(np.float32).round(1),
        "bits": rng.integers(0, 2**32, (*lead, size), np.uint32).view(np.float32),
    }[kind]
    k = np.asarray(rng.integers(-1, min(size, max_k) + 3, lead), np.int32)
    for actual, expected in zip(*both(select_top_k, (scores, k), max_k=max_k), strict=True):
        assert actual.dtype == jnp.int32
        np.testing.assert_array_equal(actual, expected)


# Sizes of groups, k, n: rows in part of a tile, in several, and in none; edges of matrices.
GROUPED = [
    ([3, 0, 4], 96, 72),
    ([0, 40, 0, 17, 1], 64, 200),
    ([1] * 7, 160, 64),
    ([300], 32, 16),
    ([0, 0, 2], 32, 64),
]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(("sizes", "inputs", "outputs"), GROUPED)
def test_multiplies_groups(sizes, inputs, outputs, is_packed):
    rng = np.random.default_rng(inputs)
    x = rng.normal(size=(sum(sizes) + 3, inputs)).astype(np.float16)  # three of no group
    weights = packed(len(sizes), inputs, outputs)
    if not is_packed:
        shape = (len(sizes), inputs, outputs)
        weights = rng.normal(size=shape).astype(np.float16)
        weights[np.array(sizes) == 0] = np.nan
    arguments = (x, weights, np.array(sizes, np.int32))
    actual, expected = (np.float32(y[: sum(sizes)]) for y in both(grouped_matmul, arguments))
    assert_close(actual, expected, TOLERANCE["float16"], "products")


def test_grouped_products_refuse_what_they_are_not_written_for():
    x, weights = jnp.zeros((4, 32)), jnp.zeros((2, 32, 8))
    with pytest.raises(ValueError, match=r"^`x` must be bfloat16 or float16, but is float32, "):
        grouped_matmul(x, weights, jnp.array([1, 3]), kernels="triton")
    x, weights = x.astype(jnp.float16), jnp.zeros((1025, 32, 8), jnp.float16)
    with pytest.raises(ValueError, match=r"^`sizes` must be of at most 1024 groups"):
        grouped_matmul(x, weights, jnp.zeros(1025, jnp.int32), kernels="triton")


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((1, 2, 4, 64), "float32", "`q` must be bfloat16 or float16, but is float32, "),
        ((1, 2, 4, 32), "float16", "`q` must have head_dim 64 or 128, but has 32, "),
        ((1, 65, 4, 64), "float16", "`q` must have at most 128 query tokens times query heads a"),
    ],
)
def test_refuses_what_it_is_not_written_for(shape, dtype, message):
    q = jnp.zeros(shape, dtype)
    cache = jnp.zeros((1, 2, 128, shape[3]), dtype)
    with pytest.raises(ValueError, match=f"^{message}.*with kernels='triton'[.]$"):
        verify_attention(q, cache, cache, jnp.array([3]), kernels="triton")
