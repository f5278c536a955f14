"""Calls of the attention ops that the tests make, and what the results are compared by."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import lacks
from pallas_kernels.sparse import api as sparse_api
from pallas_kernels.sparse import reference as sparse_reference
from pallas_kernels.verify import api as verify_api
from pallas_kernels.verify import reference as verify_reference
from pallas_kernels.verify.key_scores import SCORE_MODES, KeyScores
from tests.pallas_kernels.arrays import TOLERANCE, assert_close, logit_noise, random_attention


@dataclasses.dataclass(frozen=True)
class VerifyCase:
    """Shapes and static arguments of a call of `verify_attention`."""

    batch: int
    cache_batch: int
    tokens: int
    rows: int  # S
    kv_heads: int
    group: int
    head_dim: int
    dtype: str
    scores: str | None = None
    mode: str | None = None  # None: either, "logit" per KV head and "weight" over all
    per_kv_head: bool = False
    block: int = 1
    window: int | None = None
    sinks: bool = False
    chunk: int | None = None  # rows that the implementation "xla" reads at a time

    def key_scores(self, mode):
        if self.scores is None:
            return None
        per_kv_head = self.per_kv_head or (self.mode is None and mode == "logit")
        return KeyScores.of(self.scores, self.tokens, mode, per_kv_head, self.block)

    def statics(self, mode):
        """The arguments that are not arrays."""
        return self.key_scores(mode), self.head_dim**-0.5, self.window

    def arrays(self, seed, magnitude, lengths, slots=None, poison=np.nan):
        """The arguments that are arrays, and the same with poison past the valid cache rows."""
        shape = (self.batch, self.cache_batch, self.tokens, self.rows)
        q, k, v = random_attention(
            seed, *shape, self.kv_heads, self.group, self.head_dim, magnitude
        )
        lengths = np.array(lengths, np.int32)
        slots = None if slots is None else np.array(slots, np.int32)
        valid = np.zeros((self.cache_batch, 1, self.rows, 1), bool)
        for i, length in enumerate(lengths):
            valid[i if slots is None else slots[i], :, : length + self.tokens] = True
        return with_poison(self, seed, (q, k, v), valid, poison, (lengths, slots))

    def taken_by(self, name):
        """Whether the case lies within the domain of an implementation."""
        heads = self.kv_heads * self.group
        q = jax.ShapeDtypeStruct((self.batch, self.tokens, heads, self.head_dim), self.dtype)
        cache = (self.cache_batch, self.kv_heads, self.rows, self.head_dim)
        cache = jax.ShapeDtypeStruct(cache, self.dtype)
        refuses = verify_api.IMPLEMENTATIONS[name].refuses
        modes = SCORE_MODES if self.mode is None else (self.mode,)
        return all(
            refuses(q, cache, cache, None, None, *self.statics(mode)) is None for mode in modes
        )


@dataclasses.dataclass(frozen=True)
class SparseCase:
    """Shapes and static arguments of a call of `sparse_attention`."""

    batch: int
    tokens: int
    rows: int  # S
    kv_heads: int
    group: int
    head_dim: int
    block: int
    size: int  # N
    max_tail: int
    dtype: str
    per_head: bool = False  # a list for each KV head
    sinks: bool = False
    chunks: tuple[int, int] | None = None  # of list and tail, for the implementation "xla"

    @property
    def statics(self):
        """The arguments that are not arrays."""
        return self.block, self.max_tail, self.head_dim**-0.5

    def arrays(self, seed, magnitude, lengths, tail_start, counts, poison=np.nan):
        """The arguments that are arrays, and the same with poison in all rows that nothing sees.

        List entries that do not count are any numbers.
        """
        rng = np.random.default_rng(seed + 1)
        shape = (self.batch, self.batch, self.tokens, self.rows)
        q, k, v = random_attention(
            seed, *shape, self.kv_heads, self.group, self.head_dim, magnitude
        )
        lists = self.kv_heads if self.per_head else 1
        blocks = rng.integers(-(2**31), 2**31, (self.batch, lists, self.size)).astype(np.int32)
        seen = np.zeros((self.batch, self.kv_heads, self.rows, 1), bool)
        for i, (length, start, count) in enumerate(zip(lengths, tail_start, counts, strict=True)):
            for head in range(lists):
                listed = rng.choice(start // self.block, count, replace=False)
                blocks[i, head, :count] = listed
                heads = head if self.per_head else slice(None)
                for block in listed:
                    seen[i, heads, block * self.block : (block + 1) * self.block] = True
            seen[i, :, start : length + self.tokens] = True
        lists = (blocks, *(np.array(x, np.int32) for x in (counts, lengths, tail_start)))
        return with_poison(self, seed, (q, k, v), seen, poison, lists)

    def taken_by(self, name):
        """Whether the case lies within the domain of an implementation."""
        heads = self.kv_heads * self.group
        q = jax.ShapeDtypeStruct((self.batch, self.tokens, heads, self.head_dim), self.dtype)
        cache = (self.batch, self.kv_heads, self.rows, self.head_dim)
        cache = jax.ShapeDtypeStruct(cache, self.dtype)
        refuses = sparse_api.IMPLEMENTATIONS[name].refuses
        return refuses(q, cache, cache, None, None, None, None, *self.statics) is None


def with_poison(case, seed, attention, valid, poison, others):
    """Arrays (q, k, v, *others, sinks), and the same with poison where rows are not valid."""
    q, k, v = attention
    sinks = None
    if case.sinks:
        sinks = np.random.default_rng(seed + 2).normal(size=q.shape[2]).astype(np.float32)
        sinks[0] = -np.inf  # one that is not there
    poisoned = (np.where(valid, x, np.float32(poison)) for x in (k, v))
    q, k, v, *poisoned = (jnp.asarray(x).astype(case.dtype) for x in (q, k, v, *poisoned))
    others = [None if x is None else jnp.asarray(x) for x in (*others, sinks)]
    return (q, k, v, *others), (q, *poisoned, *others)


@functools.cache
def compiled_verify(run, statics, **extra):
    """A compiled implementation of `verify_attention`, on what `VerifyCase.arrays` gives."""
    return jax.jit(
        lambda q, k, v, lengths, slots, sinks: run(
            q, k, v, lengths, slots, *statics, sinks, **extra
        )
    )


@functools.cache
def compiled_sparse(run, statics, **extra):
    """A compiled implementation of `sparse_attention`, on what `SparseCase.arrays` gives."""
    return jax.jit(
        lambda q, k, v, blocks, counts, lengths, tail_start, sinks: run(
            q, k, v, blocks, counts, lengths, tail_start, *statics, sinks, **extra
        )
    )


def verify_reference_of(case, mode=None):
    """The reference of `verify_attention`, compiled."""
    return compiled_verify(verify_reference.verify_attention, case.statics(mode or case.mode))


def sparse_reference_of(case):
    """The reference of `sparse_attention`, compiled."""
    return compiled_sparse(sparse_reference.sparse_attention, case.statics)


def available(implementations):
    """Names of the implementations that "auto" chooses from and this machine can run."""
    return [
        name
        for name in ("xla", "mosaic_gpu", "triton")
        if name in implementations and lacks(name) is None
    ]


def for_each_implementation(implementations, cases):
    """Pairs (name, case) for all implementations of this machine and the cases that they take."""
    return [
        (name, case) for name in available(implementations) for case in cases if case.taken_by(name)
    ]


def assert_attention(actual, expected, case, magnitude=1.0):
    """Compares the output and the log-sum-exp with the reference's."""
    assert actual[0].dtype == case.dtype
    assert actual[1].dtype == jnp.float32
    tolerance = TOLERANCE[case.dtype] * logit_noise(magnitude, case.dtype)
    assert_close(actual[0], expected[0], tolerance, "out")
    # Float32 sums of products of the same numbers, whatever the dtype.
    assert_close(actual[1], expected[1], 5e-6, "lse")


def assert_scores(actual, expected, key_scores, name, magnitude=1.0):
    """Compares key scores; `name` is the implementation's."""
    if key_scores is None:
        assert actual is None
        return
    assert actual.dtype == jnp.float32
    if key_scores.mode == "logit":
        assert_close(actual, expected, 5e-6 * max(1.0, magnitude), "scores")
        return
    # An error in a logit is one of its weight, relatively. The Mosaic kernel writes, or adds up,
    # weights that are rounded to the 8 bits of bfloat16, by up to 2**-9 of each, and a factor of
    # two is left; in float16 it drops weights below 2**-25 of the row's largest. The Triton kernel
    # writes logarithms in float32: up to 32 in size, each of a few is off by up to 2**-20.
    growth = max(1.0, magnitude)
    relative = {"xla": 5e-6 * growth, "triton": 2**-17 * growth}.get(name, 2**-8)
    np.testing.assert_allclose(actual, expected, rtol=relative, atol=1e-7, err_msg="scores")


def assert_same(actual, expected):
    """Equal bit for bit."""
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
