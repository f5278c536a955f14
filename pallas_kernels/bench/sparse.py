"""The table of `sparse_attention`: a draft step over listed blocks and a tail."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import shapes, sparse_attention
from pallas_kernels.bench import timing
from pallas_kernels.bench.cases import Case, Check, Machine, compare, measure, runnable
from pallas_kernels.bench.table import Table
from pallas_kernels.bench.verify import TOLERANCES, random_attention
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
        {
            "heads": 12,
            "B x S": 8,
            "block": 2,
            "implementation": 14,
            "floor us": 6,
            "us": 8,
            "TB/s": 5,
            "of copy": 7,
            "error": 7,
        }
    )
    return all([table_of(table, cache, keys, machine) for cache in caches])


def table_of(table: Table, cache: CacheShape, keys: int, machine: Machine) -> bool:
    """Prints the rows of one shape; whether they are all right."""
    q, k, v = random_attention(cache, tokens=1)
    read = cache.bytes(keys + shapes.SPARSE_TAIL) + q.nbytes
    floor = read / machine.bandwidth
    last_trip = timing.trips(floor) - 1
    # A step's own row counts in the tail. No list reaches it: see `disjoint_lists`.
    lengths = jnp.asarray(cache.rows - 1 - np.arange(cache.batch) % 8, jnp.int32)
    names = runnable(IMPLEMENTATIONS)

    cases = []
    for block in shapes.SPARSE_BLOCKS:
        lists = disjoint_lists(cache, keys, block)
        size = lists.shape[2]
        counts = jnp.full((cache.batch,), size, jnp.int32)
        ragged = jnp.arange(1, cache.batch + 1, dtype=jnp.int32) * size // cache.batch
        expected = reference(
            q, k, v, lists[last_trip % len(lists)], ragged, lengths, block_size=block
        )
        inputs, checked = (q, k, v, lists, counts, lengths), (q, k, v, lists, ragged, lengths)
        for kernels in names:
            call = functools.partial(attend, block_size=block, kernels=kernels)
            check = functools.partial(check_outputs, expected=expected)
            cases.append(Case(kernels, (str(block),), call, [inputs], [checked], check))

    right = True
    for outcome in measure(cases, floor, machine):
        first = [cache.heads.model, cache.size, *outcome.case.labels, outcome.case.kernels]
        table.row([*first, f"{floor * 1e6:.1f}", *outcome.cells(read, machine)])
        right &= not outcome.failed
    return right


def disjoint_lists(cache: CacheShape, keys: int, block_size: int) -> jax.Array:
    """Lists [L, B, N] of blocks that have none in common, nor a row with any sequence's tail."""
    size = keys // block_size
    blocks = (cache.rows - 64) // block_size
    count = min(MAX_LISTS, blocks // size)
    rng = np.random.default_rng(0)
    order = rng.permuted(np.tile(np.arange(blocks, dtype=np.int32), (cache.batch, 1)), axis=1)
    lists = order[:, : count * size].reshape(cache.batch, count, size).swapaxes(0, 1)
    return jnp.asarray(np.sort(lists, axis=2))


def attend(
    trip: jax.Array,
    nudge: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lists: jax.Array,
    counts: jax.Array,
    lengths: jax.Array,
    *,
    block_size: int,
    kernels: str,
) -> dict[str, jax.Array]:
    """One call, see `timing.looped`; each trip has another list."""
    blocks = jax.lax.dynamic_index_in_dim(lists, trip % len(lists), keepdims=False)
    out, lse = sparse_attention(
        q + nudge.astype(q.dtype),
        k,
        v,
        blocks,
        counts,
        lengths,
        block_size=block_size,
        tail_start=lengths + 1 - shapes.SPARSE_TAIL,
        max_tail=shapes.SPARSE_TAIL,
        kernels=kernels,
    )
    return {"out": out, "lse": lse}


@functools.partial(jax.jit, static_argnames="block_size")
def positions(blocks: jax.Array, *, block_size: int) -> jax.Array:
    """The rows [B, N * block_size] of blocks [B, N]."""
    offsets = jnp.arange(block_size, dtype=jnp.int32)[None, None]
    return (blocks[..., None] * block_size + offsets).reshape(len(blocks), -1)


def reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    blocks: jax.Array,
    counts: jax.Array,
    lengths: jax.Array,
    *,
    block_size: int,
) -> dict[str, jax.Array]:
    """Outputs by single positions, whatever the size of the blocks: one program for all."""
    lists = positions(blocks, block_size=block_size)[None]
    return attend_to_positions(q, k, v, lists, counts * block_size, lengths)


@jax.jit
def attend_to_positions(*inputs: jax.Array) -> dict[str, jax.Array]:
    """The reference's outputs for one list of single positions."""
    return attend(jnp.int32(0), jnp.float32(0), *inputs, block_size=1, kernels="reference")


def check_outputs(outputs: dict[str, jax.Array], expected: dict[str, jax.Array]) -> Check:
    """Compares all outputs."""
    return compare((outputs[name], value, TOLERANCES[name]) for name, value in expected.items())
