"""The table of `verify_attention`: dense attention, with and without scoring its keys."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import shapes, verify_attention
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
from pallas_kernels.shapes import CacheShape
from pallas_kernels.verify.api import IMPLEMENTATIONS

# Scores of the first and last token, by name in the table.
FORMS: dict[str, dict[str, Any]] = {
    "none": {"scores": None},
    "logit": {"scores": "first+last", "score_mode": "logit"},
    "weight, blocks of 16": {"scores": "first+last", "score_mode": "weight", "score_block": 16},
    "weight, single keys": {"scores": "first+last", "score_mode": "weight"},
}
# Of implementations that "auto" does not prefer here: each takes seconds to compile.
OTHER_FORMS = {"triton": ("none", "weight, blocks of 16"), "xla": ("none",)}
LONE_OUTPUTS = ("out", "scores")  # what a round of decoding asks for
# See `compare`: bfloat16 keeps 8 bits of a weight and of an output.
TOLERANCES = {"out": 2e-2, "lse": 1e-3, "scores": 1e-2}


def run(machine: Machine, quick: bool) -> bool:
    """Prints the table; whether all of it is right."""
    caches = shapes.CACHES
    if machine.small or quick:
        caches = (shapes.SMALL_CACHE if machine.small else shapes.QUICK_CACHE,)
    groups = [group_of(cache, tokens, machine) for cache in caches for tokens in shapes.TOKENS]
    table = Table(
        {"heads": 12, "B x S": 8, "T": 1, "implementation": 14, "scores": 20, "over none": 9}
        | COLUMNS
    )
    right, unscored = True, {}
    for group, case, outcome in measure(groups, machine):
        over, op = "", (group.names, case.kernels)
        if outcome.seconds is not None and case.label == "none":
            unscored[op] = outcome.seconds
        elif outcome.seconds is not None and op in unscored:
            over = f"{outcome.seconds / unscored[op] - 1:+.1%}"
        first = [*group.names, case.kernels, case.label, over]
        table.row(first + outcome.cells(group, machine))
        right &= not outcome.failed
    return right


def group_of(cache: CacheShape, tokens: int, machine: Machine) -> Group:
    """The rows of one shape."""
    heads = cache.heads
    forms = list(FORMS) if tokens > 1 else ["none"]
    checked = sorted({0, cache.batch // 2, cache.batch - 1})  # sequences

    def prepare() -> dict[str, Any]:
        q = normal(0, (cache.batch, tokens, heads.query, heads.dim)) * 3  # logits of about 3
        k, v = normal(1, cache.shape), normal(2, cache.shape)
        full = jnp.full((cache.batch,), cache.rows - tokens, jnp.int32)
        # To check with, sequences of all sizes; the last one is empty but for its new tokens.
        ragged = jnp.asarray(np.linspace(cache.rows - tokens, 0, cache.batch), jnp.int32)
        inputs = {"": ([(q, k, v, ragged)], [(q, k, v, full)])}
        if tokens == 1:  # in cuDNN's own layout, so that no transposition is timed
            k, v = (x.swapaxes(1, 2) for x in (k, v))
            inputs["BSKD"] = ([(q, k, v, ragged)], [(q, k, v, full)])
        return inputs

    def expect(inputs: Any) -> dict[str, Any]:
        q, k, v, lengths = inputs[""][0][0]

        def one(slot: jax.Array) -> dict[str, Any]:
            slots = slot[None]
            call = functools.partial(attend, kernels="reference", slots=slots)
            sequence = (slot, jnp.float32(0), q[slots], k, v, lengths[slots])
            return {form: call(*sequence, **FORMS[form]) for form in forms}

        # One after another: float32 logits take room.
        found = lax.map(one, jnp.array(checked, jnp.int32))
        return jax.tree.map(lambda x: x[:, 0], found)

    def case(kernels: str, form: str) -> Case:
        call = functools.partial(attend, kernels=kernels, **FORMS[form])
        compared = functools.partial(check, form=form, sequences=checked)
        alone = () if kernels == "xla" else LONE_OUTPUTS
        return Case(kernels, form, call, compared, alone=alone)

    cases = []
    for place, kernels in enumerate(runnable(IMPLEMENTATIONS)):
        chosen = forms if place == 0 else OTHER_FORMS[kernels]
        cases += [case(kernels, form) for form in forms if form in chosen]
    if tokens == 1 and not machine.small:
        compared = functools.partial(check, form="none", sequences=checked)
        cases.append(Case("cuDNN", "none", attend_cudnn, compared, "BSKD", LONE_OUTPUTS, peer=True))
    q_bytes = 2 * cache.batch * tokens * heads.query * heads.dim
    names = (heads.model, cache.size, str(tokens))
    return Group(names, prepare, expect, cache.bytes(cache.rows) + q_bytes, cases)


@functools.partial(jax.jit, static_argnums=1)
def normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    """Random numbers in bfloat16."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def attend(
    trip: jax.Array,
    nudge: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    **form: Any,
) -> dict[str, jax.Array]:
    """One call, see `timing.looped`."""
    del trip
    q = q + nudge.astype(q.dtype)
    out, lse, scores = verify_attention(q, k, v, lengths, **form)
    return {"out": out, "lse": lse} | ({} if scores is None else {"scores": scores})


def attend_cudnn(
    trip: jax.Array,
    nudge: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
) -> dict[str, jax.Array]:
    """The same for one token and k, v [B, S, K, D]."""
    del trip
    out = jax.nn.dot_product_attention(
        q + nudge.astype(q.dtype),
        k,
        v,
        query_seq_lengths=jnp.ones_like(lengths),
        key_value_seq_lengths=lengths + 1,
        implementation="cudnn",
    )
    return {"out": out}


def check(outputs: dict[str, Any], expected: Any, form: str, sequences: list[int]) -> Check:
    """Compares the outputs of some sequences."""
    chosen = jnp.array(sequences, jnp.int32)
    return compare(
        (value[chosen], expected[form][name], TOLERANCES[name]) for name, value in outputs.items()
    )
