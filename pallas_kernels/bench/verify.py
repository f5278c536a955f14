"""The table of `verify_attention`: dense attention, with and without scoring its keys."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import shapes, verify_attention
from pallas_kernels.bench.cases import Case, Check, Machine, compare, measure, runnable
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
FEW_FORMS = ("none", "weight, blocks of 16")  # of implementations that "auto" does not prefer
# See `compare`: bfloat16 keeps 8 bits of a weight and of an output.
TOLERANCES = {"out": 2e-2, "lse": 1e-3, "scores": 1e-2}


def run(machine: Machine, quick: bool) -> bool:
    """Prints the table; whether all of it is right."""
    caches = shapes.CACHES
    if machine.small or quick:
        caches = (shapes.SMALL_CACHE if machine.small else shapes.QUICK_CACHE,)
    table = Table(
        {
            "heads": 12,
            "B x S": 8,
            "T": 1,
            "implementation": 14,
            "scores": 20,
            "us": 8,
            "TB/s": 5,
            "of copy": 7,
            "error": 7,
            "over none": 9,
        }
    )
    return all([table_of(table, cache, t, machine) for cache in caches for t in shapes.TOKENS])


def table_of(table: Table, cache: CacheShape, tokens: int, machine: Machine) -> bool:
    """Prints the rows of one shape; whether they are all right."""
    heads = cache.heads
    q, k, v = random_attention(cache, tokens)
    lengths = jnp.full((cache.batch,), cache.rows - tokens, jnp.int32)
    # To check with, sequences of all sizes; the last one is empty but for its new tokens.
    ragged = jnp.asarray(np.linspace(cache.rows - tokens, 0, cache.batch), jnp.int32)
    forms = FORMS if tokens > 1 else {"none": FORMS["none"]}
    checked = sorted({0, cache.batch // 2, cache.batch - 1})  # sequences
    expected = reference(forms, q, k, v, ragged, checked)

    cases = []
    for place, kernels in enumerate(runnable(IMPLEMENTATIONS)):
        for form in forms if place == 0 else [form for form in forms if form in FEW_FORMS]:
            call = functools.partial(attend, kernels=kernels, **forms[form])
            rotations = [(q, k, v, lengths)], [(q, k, v, ragged)]
            check = functools.partial(check_outputs, expected=expected[form], sequences=checked)
            cases.append(Case(kernels, (form,), call, *rotations, check))
    if tokens == 1 and not machine.small:
        # In cuDNN's own layout, so that no transposition is timed.
        keys, values = (jax.jit(lambda x: x.swapaxes(1, 2))(x) for x in (k, v))
        rotations = [(q, keys, values, lengths)], [(q, keys, values, ragged)]
        out = {"out": expected["none"]["out"]}
        check = functools.partial(check_outputs, expected=out, sequences=checked)
        cases.append(Case("cuDNN", ("none",), attend_cudnn, *rotations, check, peer=True))

    read = cache.bytes(cache.rows) + q.nbytes
    right, unscored = True, {}
    for outcome in measure(cases, read / machine.bandwidth, machine):
        kernels, form = outcome.case.kernels, outcome.case.labels[0]
        over = ""
        if outcome.seconds is not None and form == "none":
            unscored[kernels] = outcome.seconds
        elif outcome.seconds is not None and kernels in unscored:
            over = f"{outcome.seconds / unscored[kernels] - 1:+.1%}"
        first = [heads.model, cache.size, str(tokens), kernels, form]
        table.row([*first, *outcome.cells(read, machine), over])
        right &= not outcome.failed
    return right


def random_attention(cache: CacheShape, tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [B, T, H, D], k and v [B, K, S, D] in bfloat16; logits are about 3."""

    @jax.jit
    def make() -> tuple[jax.Array, jax.Array, jax.Array]:
        keys = jax.random.split(jax.random.key(0), 3)
        q_shape = (cache.batch, tokens, cache.heads.query, cache.heads.dim)
        q = 3 * jax.random.normal(keys[0], q_shape, jnp.bfloat16)
        k, v = (jax.random.normal(key, cache.shape, jnp.bfloat16) for key in keys[1:])
        return q, k, v

    return make()


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


def reference(
    forms: dict[str, dict[str, Any]],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    sequences: list[int],
) -> dict[str, dict[str, jax.Array]]:
    """Outputs for some sequences, by form; one after another, since float32 logits take room."""

    @jax.jit
    def one(slot: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> Any:
        slots = slot[None]
        q, lengths = q[slots], lengths[slots]
        call = functools.partial(attend, kernels="reference", slots=slots)
        return {
            name: call(slot, jnp.float32(0), q, k, v, lengths, **form)
            for name, form in forms.items()
        }

    found = [one(jnp.int32(sequence), q, k, v, lengths) for sequence in sequences]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *found)


def check_outputs(
    outputs: dict[str, jax.Array], expected: dict[str, jax.Array], sequences: list[int]
) -> Check:
    """Compares what stands in `expected`, the outputs for `sequences`."""
    chosen = jnp.array(sequences, jnp.int32)
    return compare(
        (outputs[name][chosen], value, TOLERANCES[name]) for name, value in expected.items()
    )
