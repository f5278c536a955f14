import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import gather_blocks, sparse_attention, verify_attention
from pallas_kernels.sparse import api, xla
from tests.pallas_kernels.arrays import MAGNITUDES, POISONS, SEEDS, assert_close, random_attention
from tests.pallas_kernels.cases import SparseCase as Case
from tests.pallas_kernels.cases import (
    assert_attention,
    assert_same,
    compiled_sparse,
    for_each_implementation,
    sparse_reference_of,
)

# B, T, S, K, G, D, block size, N, max_tail, dtype.
CASES = [
    Case(1, 1, 64, 2, 4, 16, 1, 20, 24, "float32", chunks=(8, 16)),
    Case(3, 1, 64, 2, 2, 16, 8, 6, 16, "float32", chunks=(16, 8)),
    Case(2, 7, 96, 1, 8, 64, 16, 5, 40, "float32", chunks=(32, 16)),
    Case(2, 3, 64, 2, 1, 128, 8, 7, 20, "float32", per_head=True),
    Case(2, 16, 64, 3, 2, 16, 1, 17, 40, "float32", per_head=True, chunks=(5, 7)),
    Case(2, 2, 64, 2, 2, 16, 8, 0, 64, "float32", chunks=(16, 16)),  # no list
    Case(2, 2, 64, 2, 4, 64, 8, 6, 24, "bfloat16", chunks=(16, 16)),
    Case(2, 1, 64, 2, 2, 16, 1, 20, 24, "float16", per_head=True, chunks=(8, 16)),
    Case(2, 2, 64, 2, 3, 16, 4, 9, 24, "float32", sinks=True, chunks=(8, 16)),
]
# What the kernels take: 16 bits, head_dim 64 or 128, blocks of 1, 8, 16, 32 or 64.
KERNEL_CASES = [
    Case(2, 1, 256, 2, 4, 128, 1, 70, 48, "bfloat16", per_head=True),
    Case(3, 7, 256, 2, 8, 64, 8, 30, 100, "float16", sinks=True),
    Case(2, 1, 200, 1, 8, 64, 8, 0, 200, "bfloat16"),  # no list
    Case(2, 2, 320, 2, 5, 128, 16, 15, 64, "bfloat16", per_head=True, sinks=True),
    Case(2, 16, 448, 1, 4, 64, 64, 6, 128, "bfloat16"),
]


@pytest.mark.parametrize(
    ("name", "case"), for_each_implementation(api.IMPLEMENTATIONS, CASES + KERNEL_CASES)
)
@settings(max_examples=8)
@given(data=st.data())
def test_agrees_with_reference_whatever_the_other_rows_hold(name, case, data):
    magnitude = data.draw(MAGNITUDES)
    longest = case.rows - case.tokens
    length = st.sampled_from([x for x in (0, 5, 17, 130, longest - 1, longest) if x <= longest])
    lengths, tail_start, counts = [], [], []
    for _ in range(case.batch):
        length_ = data.draw(length)
        shortest = max(0, length_ + case.tokens - case.max_tail)
        start = data.draw(st.sampled_from([shortest, (shortest + length_) // 2, length_]))
        most = min(case.size, start // case.block)  # blocks that lie below the tail
        lengths.append(length_)
        tail_start.append(start)
        counts.append(data.draw(st.sampled_from([0, min(1, most), max(0, most - 1), most])))
    clean, poisoned = case.arrays(
        data.draw(SEEDS), magnitude, lengths, tail_start, counts, data.draw(POISONS)
    )

    extra = {}
    if name == "xla" and case.chunks is not None:
        extra = dict(zip(("list_chunk", "tail_chunk"), case.chunks, strict=True))
    run = compiled_sparse(api.IMPLEMENTATIONS[name].run, case.statics, **extra)
    expect = sparse_reference_of(case)
    actual, expected = run(*poisoned), expect(*clean)
    assert_attention(actual, expected, case, magnitude)
    assert_same(run(*poisoned), actual)
    assert_same(run(*clean), actual)
    assert_same(expect(*poisoned), expected)


@pytest.mark.parametrize("case", KERNEL_CASES)
def test_the_hopper_kernel_takes_its_cases(case):
    assert case.taken_by("mosaic_gpu")


@pytest.mark.parametrize("sinks", [[0.5, -np.inf], [30.0, -2.0]])
def test_sinks_take_weight_and_have_no_value(sinks):
    q, k, v = random_attention(5, 1, 1, 2, 16, 1, 2, 16, 1.0)
    blocks, counts = np.array([[2, 0]], np.int32), np.array([2], np.int32)
    lengths, tail_start = np.array([13], np.int32), np.array([12], np.int32)
    settings = {"block_size": 4, "max_tail": 4, "sinks": np.array(sinks, np.float32)}
    actual = [
        jax.jit(functools.partial(sparse_attention, **settings, kernels=kernels))(
            q, k, v, blocks, counts, lengths, tail_start=tail_start
        )
        for kernels in ("xla", "reference")
    ]

    out, lse = np.zeros(q.shape), np.zeros(q.shape[:3])
    for t, h in np.ndindex(2, 2):
        seen = [8, 9, 10, 11, 0, 1, 2, 3, *range(12, 14 + t)]
        weights = np.exp(k[0, 0, seen].astype(np.float64) @ q[0, t, h] / 4)
        total = weights.sum() + np.exp(sinks[h])
        out[0, t, h] = weights @ v[0, 0, seen] / total
        lse[0, t, h] = np.log(total)
    for result in actual:
        assert_close(result[0], out, 2e-6)
        assert_close(result[1], lse, 2e-6)


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
    cache = jax.ShapeDtypeStruct((1, 2, 2**20, 64), dtype)  # next to it, cuBLAS takes little
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
        ("sinks", {"sinks": jnp.zeros((2,))}),
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
