"""The table of `select_top_k`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import select_top_k, shapes
from pallas_kernels.bench.cases import COLUMNS, Case, Check, Group, Machine, measure, runnable
from pallas_kernels.bench.table import Table
from pallas_kernels.select.api import IMPLEMENTATIONS
from pallas_kernels.shapes import SelectShape

L2_BYTES = 60_000_000  # of an H100 or H200; no other that the kernels run on has more
MAX_ARRAYS = 4


def run(machine: Machine, quick: bool) -> bool:
    """Prints the table; whether all of it is right."""
    selections = shapes.QUICK_SELECTIONS if quick else shapes.SELECTIONS
    if machine.small:
        selections = (shapes.SMALL_SELECTION,)
    print(
        "Calls take turns at a few arrays, together more than L2 holds; scores of which four are\n"
        "less stay there, as after the op that wrote them. The error counts positions.\n"
    )
    table = Table({"scores": 14, "k": 4, "implementation": 14} | COLUMNS)
    right = True
    groups = [group_of(shape, machine) for shape in selections]
    for group, case, outcome in measure(groups, machine):
        table.row([*group.names, case.kernels, *outcome.cells(group, machine)])
        right &= not outcome.failed
    return right


def group_of(shape: SelectShape, machine: Machine) -> Group:
    """The rows of one shape."""
    lead = (shape.layers, shape.batch)
    read = 4 * shape.layers * shape.batch * shape.size
    arrays = -(-2 * L2_BYTES // read)  # more than L2 holds, while they are few
    if arrays > MAX_ARRAYS or machine.small:
        arrays = 1

    def prepare() -> dict[str, Any]:
        k = jnp.full(lead, shape.k, jnp.int32)
        rotation = [(random_scores(i, (*lead, shape.size)), k) for i in range(arrays)]
        return {"": (rotation, rotation)}

    def expect(inputs: Any) -> jax.Array:
        scores, k = inputs[""][0][-1]
        positions, _ = select_top_k(scores, k, max_k=shape.k, kernels="reference")
        return positions

    cases = []
    for kernels in runnable(IMPLEMENTATIONS):
        call = functools.partial(pick, kernels=kernels, max_k=shape.k)
        alone = () if kernels == "xla" else ("counts", "positions")
        cases.append(Case(kernels, "", call, check, alone=alone))
    call = functools.partial(pick_by_sorting, max_k=shape.k)
    cases.append(Case("lax.top_k", "", call, check, peer=True))
    return Group((str([*lead, shape.size]), str(shape.k)), prepare, expect, read, cases)


@functools.partial(jax.jit, static_argnums=1)
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


def check(outputs: dict[str, jax.Array], expected: jax.Array) -> Check:
    """Counts the positions that differ, in whatever order they stand."""
    wrong = int((jnp.sort(outputs["positions"], axis=-1) != expected).sum())
    return Check(wrong, wrong == 0)
