"""The table of `select_top_k`."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import select_top_k, shapes
from pallas_kernels.bench.cases import Case, Check, Machine, measure, runnable
from pallas_kernels.bench.table import Table
from pallas_kernels.select.api import IMPLEMENTATIONS
from pallas_kernels.shapes import SelectShape

L2_BYTES = 60e6  # of an H100 or H200; no other that the kernels run on has more
MAX_ARRAYS = 4


def run(machine: Machine, quick: bool) -> bool:
    """Prints the table; whether all of it is right."""
    selections = shapes.SELECTIONS
    if machine.small or quick:
        selections = (shapes.SMALL_SELECTION,) if machine.small else shapes.QUICK_SELECTIONS
    print(
        "Scores that four arrays of fit in L2 stay there, as after the op that wrote them.\n"
        "The error counts positions. `lax.top_k` leaves the positions unordered.\n"
    )
    table = Table(
        {
            "scores": 14,
            "k": 4,
            "implementation": 14,
            "us": 8,
            "TB/s": 5,
            "of copy": 7,
            "error": 7,
        }
    )
    return all([table_of(table, shape, machine) for shape in selections])


def table_of(table: Table, shape: SelectShape, machine: Machine) -> bool:
    """Prints the rows of one shape; whether they are all right."""
    lead = (shape.layers, shape.batch)
    read = 4 * shape.layers * shape.batch * shape.size
    arrays = next((n for n in range(1, MAX_ARRAYS + 1) if n * read > 2 * L2_BYTES), MAX_ARRAYS)
    if arrays * read <= L2_BYTES or machine.small:
        arrays = 1
    scores = [random_scores(i, (*lead, shape.size)) for i in range(arrays)]
    k = jnp.full(lead, shape.k, jnp.int32)
    rotation = [(x, k) for x in scores]
    expected = jax.jit(functools.partial(pick, kernels="reference", max_k=shape.k))(
        jnp.int32(0), jnp.float32(0), *rotation[-1]
    )["positions"]
    check = functools.partial(check_positions, expected=expected)

    cases = []
    for kernels in runnable(IMPLEMENTATIONS):
        call = functools.partial(pick, kernels=kernels, max_k=shape.k)
        cases.append(Case(kernels, (), call, rotation, rotation, check))
    call = functools.partial(pick_by_sorting, max_k=shape.k)
    cases.append(Case("lax.top_k", (), call, rotation, rotation, check, peer=True))

    right = True
    for outcome in measure(cases, read / machine.bandwidth, machine):
        cells = outcome.cells(read, machine)
        table.row([str([*lead, shape.size]), str(shape.k), outcome.case.kernels, *cells])
        right &= not outcome.failed
    return right


@functools.partial(jax.jit, static_argnums=(0, 1))
def random_scores(seed: int, shape: tuple[int, ...]) -> jax.Array:
    """Like attention weights: positive, of all orders of magnitude, hardly two the same."""
    return jnp.exp(3 * jax.random.normal(jax.random.key(seed), shape, jnp.float32))


def pick(
    trip: jax.Array, nudge: jax.Array, scores: jax.Array, k: jax.Array, *, kernels: str, max_k: int
) -> dict[str, jax.Array]:
    """One call, see `timing.looped`."""
    del trip
    if kernels == "xla":  # it sorts without looking at `k`; that it adds is fused with what it does
        scores = scores + nudge
    k = k + nudge.astype(jnp.int32)
    positions, counts = select_top_k(scores, k, max_k=max_k, kernels=kernels)
    return {"counts": counts, "positions": positions}


def pick_by_sorting(
    trip: jax.Array, nudge: jax.Array, scores: jax.Array, k: jax.Array, *, max_k: int
) -> dict[str, jax.Array]:
    """The peer."""
    del trip, k
    return {"positions": jax.lax.top_k(scores + nudge, max_k)[1]}


def check_positions(outputs: dict[str, jax.Array], expected: jax.Array) -> Check:
    """Counts the positions that differ, in whatever order they stand."""
    wrong = int((jnp.sort(outputs["positions"], axis=-1) != expected).sum())
    return Check(wrong, wrong == 0)
