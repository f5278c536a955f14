"""The table of `grouped_matmul`: tokens through the experts that they were sent to."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import MXFP4, grouped_matmul, shapes
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
from pallas_kernels.grouped.api import IMPLEMENTATIONS
from pallas_kernels.grouped.mxfp4 import BLOCK
from pallas_kernels.shapes import ExpertsShape

TURNS = 4  # choices of experts that calls take in turn: together more than L2 holds


def run(machine: Machine, quick: bool) -> bool:
    """Prints the table; whether all of it is right."""
    products, tokens = shapes.EXPERTS, shapes.EXPERT_TOKENS
    if quick:
        products, tokens = shapes.QUICK_EXPERTS, shapes.QUICK_EXPERT_TOKENS
    if machine.small:
        products, tokens = shapes.SMALL_EXPERTS, shapes.SMALL_EXPERT_TOKENS
    print(
        "Each token goes to experts chosen at random; the floor is reading the rows, and the\n"
        f"matrices of all experts that were chosen. Calls take turns at {TURNS} choices.\n"
    )
    table = Table(
        {"model": 13, "matrices": 18, "tokens": 4, "implementation": 14, "floor us": 5} | COLUMNS
    )
    right = True
    groups = [group_of(product, count, machine) for product in products for count in tokens]
    for group, case, outcome in measure(groups, machine):
        floor = f"{group.floor(machine) * 1e6:.1f}"
        table.row([*group.names, case.kernels, floor, *outcome.cells(group, machine)])
        right &= not outcome.failed
    return right


def group_of(product: ExpertsShape, tokens: int, machine: Machine) -> Group:
    """The rows of one product for so many tokens."""
    sizes = [group_sizes(product, tokens, turn) for turn in range(TURNS)]
    dtype = jnp.dtype(jnp.float32 if machine.small else jnp.bfloat16)
    rows = tokens * product.chosen

    def prepare() -> dict[str, Any]:
        matrices = random_matrices(product, dtype)
        x = normal(0, (rows, product.inputs)).astype(dtype)
        rotation = [(x, matrices, jnp.asarray(size)) for size in sizes]
        return {"": (rotation, rotation)}

    def expect(inputs: Any) -> jax.Array:
        return grouped_matmul(*inputs[""][0][-1], kernels="reference")

    matrix = product.inputs * product.outputs
    matrix = matrix // 2 + matrix // BLOCK if product.packed else matrix * dtype.itemsize
    touched = sum(np.count_nonzero(size) for size in sizes) / TURNS
    read = int(touched * matrix) + rows * product.inputs * dtype.itemsize
    cases = [
        Case(
            kernels,
            "",
            functools.partial(multiply, kernels=kernels),
            check,
            alone=() if kernels == "xla" else ("out",),
        )
        for kernels in runnable(IMPLEMENTATIONS)
    ]
    name = f"{product.experts} x [{product.inputs}, {product.outputs}]"
    return Group((product.model, name, str(tokens)), prepare, expect, read, cases)


def group_sizes(product: ExpertsShape, tokens: int, seed: int) -> np.ndarray:
    """How many tokens each expert gets, int32 [X]."""
    rng = np.random.default_rng(seed)
    chosen = [rng.choice(product.experts, product.chosen, replace=False) for _ in range(tokens)]
    return np.bincount(np.concatenate(chosen), minlength=product.experts).astype(np.int32)


def random_matrices(product: ExpertsShape, dtype: jnp.dtype) -> jax.Array | MXFP4:
    """One an expert; products are about 1."""
    experts, inputs, outputs = product.experts, product.inputs, product.outputs
    if not product.packed:
        return (normal(1, (experts, inputs, outputs)) * inputs**-0.5).astype(dtype)
    shape = (experts, outputs, inputs // BLOCK)
    blocks = jax.random.bits(jax.random.key(1), (*shape, BLOCK // 2), jnp.uint8)
    scales = jax.random.randint(jax.random.key(2), shape, 118, 122).astype(jnp.uint8)
    return MXFP4(blocks, scales)


def multiply(
    trip: jax.Array,
    nudge: jax.Array,
    x: jax.Array,
    matrices: Any,
    sizes: jax.Array,
    *,
    kernels: str,
) -> dict[str, jax.Array]:
    """One call, see `timing.looped`."""
    del trip
    return {"out": grouped_matmul(x + nudge.astype(x.dtype), matrices, sizes, kernels=kernels)}


def check(outputs: dict[str, jax.Array], expected: jax.Array) -> Check:
    """Compares the products."""
    return compare([(outputs["out"], expected, TOLERANCES["out"])])
