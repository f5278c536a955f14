import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import gather_blocks, sparse_attention, verify_attention
from pallas_kernels.sparse import reference, xla
from tests.pallas_kernels.arrays import (
    MAGNITUDES,
    POISONS,
    SEEDS,
    TOLERANCE,
    assert_close,
    logit_noise,
    random_attention,
)

# B, T, S, K, G, D, block size, N, max_tail, (list, tail) chunks, a list per KV head, dtype.
CASES = [
    (1, 1, 64, 2, 4, 16, 1, 20, 24, (8, 16), False, "float32"),
    (3, 1, 64, 2, 2, 16, 8, 6, 16, (16, 8), False, "float32"),
    (2, 7, 96, 1, 8, 64, 16, 5, 40, (32, 16), False, "float32"),
    (2, 3, 64, 2, 1, 128, 8, 7, 20, None, True, "float32"),
    (2, 16, 64, 3, 2, 16, 1, 17, 40, (5, 7), True, "float32"),
    (2, 2, 64, 2, 2, 16, 8, 0, 64, (16, 16), False, "float32"),  # no list
    (2, 2, 64, 2, 4, 64, 8, 6, 24, (16, 16), False, "bfloat16"),
    (2, 1, 64, 2, 2, 16, 1, 20, 24, (8, 16), True, "float16"),
]


@functools.cache
def compiled(implementation, block_size, max_tail, scale, chunks):
    extra = {} if chunks is None else {"list_chunk": chunks[0], "tail_chunk": chunks[1]}
    return jax.jit(lambda *arrays: implementation(*arrays, block_size, max_tail, scale, **extra))


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=8)
@given(data=st.data())
def test_agrees_with_reference_whatever_the_other_rows_hold(case, data):
    batch, tokens, rows, kv_heads, group, head_dim, block, size, max_tail, chunks, *rest = case
    per_head, dtype = rest
    magnitude = data.draw(MAGNITUDES) if dtype == "float32" else 1.0
    seed = data.draw(SEEDS)
    rng = np.random.default_rng(seed + 1)
    q, k, v = random_attention(
        seed, batch, batch, tokens, rows, kv_heads, group, head_dim, magnitude
    )
    lists = kv_heads if per_head else 1

    lengths = [data.draw(st.sampled_from([0, 5, 17, rows - tokens])) for _ in range(batch)]
    tail_start, counts = np.zeros((2, batch), np.int32)
    blocks = rng.integers(-(2**31), 2**31, (batch, lists, size)).astype(np.int32)
    dead = np.ones((batch, kv_heads, rows), bool)
    for i, length in enumerate(lengths):
        shortest = max(0, length + tokens - max_tail)
        start = data.draw(st.sampled_from([shortest, (shortest + length) // 2, length]))
        tail_start[i] = start
        below = start // block  # blocks that lie below the tail
        counts[i] = data.draw(st.sampled_from([0, min(1, size, below), min(size, below)]))
        for head in range(lists):
            listed = np.sort(rng.choice(below, counts[i], replace=False))
            blocks[i, head, : counts[i]] = listed
            heads = head if per_head else slice(None)
            for b in listed:
                dead[i, heads, b * block : min((b + 1) * block, start)] = False
        dead[i, :, start : length + tokens] = False

    poison = data.draw(POISONS)
    poisoned_k, poisoned_v = (np.where(dead[..., None], np.float32(poison), x) for x in (k, v))
    q, k, v, poisoned_k, poisoned_v = (
        jnp.asarray(x).astype(dtype) for x in (q, k, v, poisoned_k, poisoned_v)
    )
    lists = (blocks, counts, np.array(lengths, np.int32), tail_start)
    lists = tuple(map(jnp.asarray, lists))
    run = compiled(xla.sparse_attention, block, max_tail, head_dim**-0.5, chunks)
    expect = compiled(reference.sparse_attention, block, max_tail, head_dim**-0.5, None)
    actual = run(q, poisoned_k, poisoned_v, *lists)
    expected = expect(q, k, v, *lists)

    assert actual[0].dtype == q.dtype
    assert actual[1].dtype == jnp.float32
    assert_close(actual[0], expected[0], TOLERANCE[dtype] * logit_noise(magnitude, dtype), "out")
    assert_close(actual[1], expected[1], 5e-6, "lse")
    for other in (run(q, poisoned_k, poisoned_v, *lists), run(q, k, v, *lists)):
        jax.tree.map(np.testing.assert_array_equal, other, actual)
    poisoned = expect(q, poisoned_k, poisoned_v, *lists)
    jax.tree.map(np.testing.assert_array_equal, poisoned, expected)


@pytest.mark.parametrize("block_size", [1, 8])
@pytest.mark.parametrize("kernels", ["xla", "reference"])
def test_a_list_of_everything_is_dense(block_size, kernels):
    q, k, v = random_attention(0, 2, 2, 3, 64, 2, 2, 16, 1.0)
    lengths = np.array([16, 50], np.int32)
    tail_start = lengths // block_size * block_size
    blocks = np.broadcast_to(np.arange(64 // block_size, dtype=np.int32), (2, 64 // block_size))
    counts = tail_start // block_size

    @jax.jit
    def run(q, k, v, tail_start):
        settings = {"block_size": block_size, "max_tail": 3 + block_size, "kernels": kernels}
        lists = (blocks, counts, lengths)
        sparse = sparse_attention(q, k, v, *lists, tail_start=tail_start, **settings)
        return sparse, verify_attention(q, k, v, lengths, kernels=kernels)[:2]

    for sparse, dense in zip(*run(q, k, v, tail_start), strict=True):
        assert_close(sparse, dense, 2e-6)


def test_one_list_for_all_heads_is_the_same_list_for_each():
    q, k, v = random_attention(0, 2, 2, 1, 64, 2, 2, 16, 1.0)
    lengths = np.array([40, 60], np.int32)
    shared = np.array([[0, 2, 3], [1, 2, 4]], np.int32)
    each = np.repeat(shared[:, None, :], 2, axis=1)
    counts = np.array([3, 2], np.int32)
    settings = {"block_size": 8, "tail_start": lengths // 8 * 8, "max_tail": 16}

    @jax.jit
    def run(blocks):
        return sparse_attention(q, k, v, blocks, counts, lengths, **settings)

    results = [run(blocks) for blocks in (shared, each)]
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize("chunk", [2048, 16])
@pytest.mark.parametrize("kernels", ["xla", "reference"])
def test_gathering_beforehand_changes_nothing(monkeypatch, kernels, chunk):
    q, k, v = random_attention(0, 2, 2, 1, 64, 2, 2, 16, 1.0)
    lengths = np.array([40, 60], np.int32)
    blocks = np.array([[0, 2, 3, 4, 77], [1, 2, 6, 99, -5]], np.int32)
    counts = np.array([4, 3], np.int32)
    v = v.copy()
    v[:, :, 61:] = np.nan
    settings = {"block_size": 8, "kernels": kernels}
    tail = {"tail_start": lengths // 8 * 8, "max_tail": 16}
    monkeypatch.setattr(xla.gather_blocks, "__defaults__", (chunk,))

    @jax.jit
    def run(k, v, fewer):
        gathered = gather_blocks(k, v, blocks, counts, **settings)
        with_it = sparse_attention(
            q, k, v, blocks, counts - fewer, lengths, gathered=gathered, **settings, **tail
        )
        without = sparse_attention(q, k, v, blocks, counts - fewer, lengths, **settings, **tail)
        return with_it, without

    for fewer in (0, 2):  # a list that begins like the gathered one
        with_it, without = run(k, v, jnp.int32(fewer))
        jax.tree.map(lambda x, y: assert_close(x, y, 1e-6), with_it, without)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [64, 1024])
def test_does_not_copy_the_cache(dtype, size):
    q = jax.ShapeDtypeStruct((1, 1, 4, 64), dtype)
    cache = jax.ShapeDtypeStruct((1, 2, 2**16, 64), dtype)
    blocks = jax.ShapeDtypeStruct((1, size), "int32")
    index = jax.ShapeDtypeStruct((1,), "int32")

    @jax.jit
    def run(q, k, v, blocks, counts, lengths, tail_start):
        settings = {"block_size": 16, "tail_start": tail_start, "max_tail": 32}

        def step(i, q):
            return sparse_attention(q, k, v, blocks, counts, lengths + i, **settings)[0]

        return jax.lax.fori_loop(0, 6, step, q)

    memory = run.lower(q, cache, cache, blocks, index, index, index).compile().memory_analysis()
    assert memory.temp_size_in_bytes < cache.size * cache.dtype.itemsize / 4


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("kernels", {"kernels": "cuda"}),
        ("blocks", {"blocks": jnp.zeros((2, 3, 5), jnp.int32)}),
        ("blocks", {"blocks": jnp.zeros((5,), jnp.int32)}),
        ("blocks", {"blocks": jnp.zeros((2, 5), jnp.float32)}),
        ("counts", {"counts": jnp.zeros((2, 2), jnp.int32)}),
        ("lengths", {"lengths": jnp.zeros((2,), jnp.float32)}),
        ("tail_start", {"tail_start": jnp.zeros((), jnp.int32)}),
        ("block_size", {"block_size": 7}),
        ("block_size", {"block_size": 0}),
        ("max_tail", {"max_tail": 0}),
        ("max_tail", {"max_tail": 25}),
        ("q", {"q": jnp.zeros((1, 1, 4, 16))}),
        ("v", {"v": jnp.zeros((2, 2, 24, 16), jnp.bfloat16)}),
    ],
)
def test_refuses_and_names_the_argument(name, change):
    zeros = jnp.zeros((2,), jnp.int32)
    arguments = {
        "q": jnp.zeros((2, 1, 4, 16)),
        "k": jnp.zeros((2, 2, 24, 16)),
        "v": jnp.zeros((2, 2, 24, 16)),
        "blocks": jnp.zeros((2, 5), jnp.int32),
        "counts": zeros,
        "lengths": zeros,
        "block_size": 8,
        "tail_start": zeros,
        "max_tail": 8,
    }
    with pytest.raises(ValueError, match=f"^`{name}` .*[.]$"):
        sparse_attention(**arguments | change)
