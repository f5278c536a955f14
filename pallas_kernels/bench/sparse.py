"""The table of `sparse_attention`: a draft step over listed blocks and a tail."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import shapes, sparse_attention
from pallas_kernels.bench import timing
from pallas_kernels.bench.cases import (
    COLUMNS,
    Case,
    Check,
    Group,
    Machine,
    compare,
    measure,
    runnable,
)
from pallas_kernels.bench.table import Table
from pallas_kernels.bench.verify import TOLERANCES, normal
from pallas_kernels.shapes import CacheShape
from pallas_kernels.sparse.api import IMPLEMENTATIONS

MAX_LISTS = 16  # disjoint lists: even of one sequence's keys they are more than L2 holds


def run(machine: Machine, quick: bool) -> bool:
    """Prints the table; whether all of it is right."""
    caches, keys = shapes.SPARSE_CACHES, shapes.SPARSE_KEYS
    if machine.small or quick:
        caches = (shapes.SMALL_CACHE if machine.small else shapes.QUICK_CACHE,)
    if machine.small:
        keys = shapes.SMALL_KEYS
    print(f"{keys} keys a sequence in lists of blocks, and a tail of {shapes.SPARSE_TAIL}.\n")
    table = Table(
        {"heads": 12, "B x S": 8, "implementation": 14, "block": 2, "floor us": 5} | COLUMNS
    )
    right = True
    groups = [group_of(cache, keys, machine) for cache in caches]
    for group, case, outcome in measure(groups, machine):
        floor = f"{group.floor(machine) * 1e6:.1f}"
        first = [*group.names, case.kernels, case.label, floor]
        table.row(first + outcome.cells(group, machine))
        right &= not outcome.failed
    return right


def group_of(cache: CacheShape, keys: int, machine: Machine) -> Group:
    """The rows of one shape, in blocks of all sizes."""
    heads, batch = cache.heads, cache.batch

    def prepare() -> dict[str, Any]:
        q = normal(0, (batch, 1, heads.query, heads.dim)) * 3  # logits of about 3
        k, v = normal(1, cache.shape), normal(2, cache.shape)
        # No list reaches a tail: see `disjoint_lists`.
        lengths = jnp.asarray(cache.rows - 1 - np.arange(batch) % 8, jnp.int32)
        tail = (lengths, lengths + 1 - shapes.SPARSE_TAIL)
        inputs = {}
        for block in shapes.SPARSE_BLOCKS:
            lists = jnp.asarray(disjoint_lists(cache, keys, block))
            full = jnp.full((batch,), keys // block, jnp.int32)
            ragged = jnp.arange(1, batch + 1, dtype=jnp.int32) * (keys // block) // batch
            inputs[str(block)] = (
                [(q, k, v, lists, ragged, *tail)],
                [(q, k, v, lists, full, *tail)],
            )
        return inputs

    def expect(inputs: Any) -> dict[str, Any]:
        """By single positions, whatever the size of the blocks."""
        positions, counts = [], []
        for block in shapes.SPARSE_BLOCKS:
            q, k, v, lists, ragged, *tail = inputs[str(block)][0][0]
            last = lists[(trips - 1) % len(lists)]
            rows = last[..., None] * block + jnp.arange(block, dtype=jnp.int32)[None, None]
            positions.append(rows.reshape(1, batch, keys))
            counts.append(ragged * block)

        def one(listed: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
            sequence = (q, k, v, *listed, *tail)
            zeros = (jnp.int32(0), jnp.float32(0))
            return attend(*zeros, *sequence, block_size=1, kernels="reference")

        found = lax.map(one, (jnp.stack(positions), jnp.stack(counts)))
        blocks = enumerate(shapes.SPARSE_BLOCKS)
        return {
            str(block): jax.tree.map(lambda x, place=place: x[place], found)
            for place, block in blocks
        }

    read = cache.bytes(keys + shapes.SPARSE_TAIL) + 2 * batch * heads.query * heads.dim
    trips = timing.trips(read / machine.bandwidth)
    cases = []
    for kernels in runnable(IMPLEMENTATIONS):
        for block in shapes.SPARSE_BLOCKS:
            call = functools.partial(attend, block_size=block, kernels=kernels)
            compared = functools.partial(check, block=block)
            alone = () if kernels == "xla" else ("out",)  # what a draft step asks for
            cases.append(Case(kernels, str(block), call, compared, str(block), alone))
    return Group((heads.model, cache.size), prepare, expect, read, cases, first)


def first(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """With one list of those that a loop's calls have in turn."""
    q, k, v, lists, *rest = inputs
    return (q, k, v, lists[:1], *rest)


def disjoint_lists(cache: CacheShape, keys: int, block_size: int) -> np.ndarray:
    """Lists [L, B, N] of blocks that have none in common, nor a row with any sequence's tail."""
    size = keys // block_size
    blocks = (cache.rows - 64) // block_size
    count = min(MAX_LISTS, blocks // size)
    rng = np.random.default_rng(0)
    order = rng.permuted(np.tile(np.arange(blocks, dtype=np.int32), (cache.batch, 1)), axis=1)
    lists = order[:, : count * size].reshape(cache.batch, count, size).swapaxes(0, 1)
    return np.sort(lists, axis=2)


def attend(
    trip: jax.Array,
    nudge: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lists: jax.Array,
    counts: jax.Array,
    lengths: jax.Array,
    tail_start: jax.Array,
    *,
    block_size: int,
    kernels: str,
) -> dict[str, jax.Array]:
    """One call, see `timing.looped`; each trip has another list."""
    blocks = lax.dynamic_index_in_dim(lists, trip % len(lists), keepdims=False)
    out, lse = sparse_attention(
        q + nudge.astype(q.dtype),
        k,
        v,
        blocks,
        counts,
        lengths,
        block_size=block_size,
        tail_start=tail_start,
        max_tail=shapes.SPARSE_TAIL,
        kernels=kernels,
    )
    return {"out": out, "lse": lse}


def check(outputs: dict[str, jax.Array], expected: Any, block: int) -> Check:
    """Compares all outputs."""
    return compare(
        (value, expected[str(block)][name], TOLERANCES[name]) for name, value in outputs.items()
    )
