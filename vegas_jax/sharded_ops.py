"""The ops of `pallas_kernels` on a mesh: each device runs them on its own heads and sequences.

XLA's partitioner cannot take a hand-written kernel apart, so every op here runs under
`jax.shard_map`, and any implementation sees arrays of its device's own size. Without a mesh (None)
each function is the op itself. Shapes are those of the whole arrays, as in `pallas_kernels`;
M is the size of the mesh's model axis.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

import pallas_kernels
from vegas_jax import cache as caches
from vegas_jax.cache import LayerCache
from vegas_jax.sharding import DATA, MODEL, rows_axis


def write(
    layer: LayerCache,
    k: Float[Array, "b T K D"],
    v: Float[Array, "b T K D"],
    positions: Int[Array, "b T"],
    slots: Int[Array, "b"] | None,
    mesh: Mesh | None,
) -> LayerCache:
    """`vegas_jax.cache.write`; slots None puts row i into sequence i.

    With slots, each device has all rows and keeps those of its own sequences.
    """
    if slots is None:
        slots = jnp.arange(k.shape[0], dtype=jnp.int32)
        local_slots, rows = None, DATA
    else:
        local_slots, rows = slots, None
    if mesh is None:
        return caches.write(layer, k, v, positions, slots)

    def put(layer: LayerCache, k: Array, v: Array, positions: Array, slots: Any) -> LayerCache:
        if slots is None:
            slots = jnp.arange(k.shape[0], dtype=jnp.int32)
        else:
            local, own = _own_slots(slots, layer[0].shape[0])
            # Others go to sequences that are not there, a different one each: they are dropped.
            slots = jnp.where(own, local, layer[0].shape[0] + slots)
        return caches.write(layer, k, v, positions, slots)

    cached, new = P(DATA, MODEL), P(rows, None, MODEL)
    return _map(
        put,
        mesh,
        (cached, new, new, P(rows), P()),
        cached,
    )(layer, k, v, positions, local_slots)


def verify_attention(
    q: Float[Array, "b T H D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    lengths: Int[Array, "b"],
    *,
    mesh: Mesh | None,
    slots: Int[Array, "b"] | None = None,
    sinks: Float[Array, "H"] | None = None,
    per_kv_head: bool = False,
    **settings: Any,
) -> tuple[Array, Array, Array | None]:
    """`pallas_kernels.verify_attention`; key scores are the mean over all devices' heads.

    With slots every device has all rows: it attends to those of its own sequences, and the results
    are summed over the data axis.
    """
    attend: Any = functools.partial(
        pallas_kernels.verify_attention, per_kv_head=per_kv_head, **settings
    )
    if mesh is None:
        return attend(q, k, v, lengths, slots=slots, sinks=sinks)

    def local(
        q: Array, k: Array, v: Array, lengths: Array, slots: Any, sinks: Any
    ) -> tuple[Array, Array, Array | None]:
        own = None
        if slots is not None:
            slots, own = _own_slots(slots, k.shape[0])
            lengths = jnp.where(own, lengths, 0)  # next to nothing to read for the others
        out, lse, scores = attend(q, k, v, lengths, slots=slots, sinks=sinks)
        if scores is not None and not per_kv_head:
            scores = lax.pmean(scores, MODEL)
        if own is None:
            return out, lse, scores
        result: tuple[Array, Array, Array | None] = jax.tree.map(
            lambda x: lax.psum(jnp.where(_like(own, x), x, jnp.zeros((), x.dtype)), DATA),
            (out, lse, scores),
        )
        return result

    rows = DATA if slots is None else None
    heads, cached = P(rows, None, MODEL), P(DATA, MODEL)
    scored = P(rows)
    if per_kv_head:
        scored = P(rows, None, MODEL) if settings.get("scores") == "each" else P(rows, MODEL)
    specs = (heads, cached, cached, P(rows), P(), P(MODEL))
    return _map(local, mesh, specs, (heads, heads, scored))(q, k, v, lengths, slots, sinks)


def sparse_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    blocks: Int[Array, "B N"] | Int[Array, "B K N"],
    counts: Int[Array, "B"],
    lengths: Int[Array, "B"],
    *,
    mesh: Mesh | None,
    tail_start: Int[Array, "B"],
    sinks: Float[Array, "H"] | None = None,
    gathered: Any = None,
    **settings: Any,
) -> tuple[Array, Array]:
    """`pallas_kernels.sparse_attention`."""
    attend: Any = functools.partial(pallas_kernels.sparse_attention, **settings)
    if mesh is None:
        lists = {"tail_start": tail_start, "sinks": sinks, "gathered": gathered}
        return attend(q, k, v, blocks, counts, lengths, **lists)

    def local(*arrays: Any) -> tuple[Array, Array]:
        *first, tail_start, sinks, gathered = arrays
        return attend(*first, tail_start=tail_start, sinks=sinks, gathered=gathered)

    heads, cached, rows = P(DATA, None, MODEL), P(DATA, MODEL), P(DATA)
    specs = (heads, cached, cached, _lists(blocks), rows, rows, rows, P(MODEL), cached)
    arrays = (q, k, v, blocks, counts, lengths, tail_start, sinks, gathered)
    return _map(local, mesh, specs, (heads, heads))(*arrays)


def gather_blocks(
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    blocks: Int[Array, "B N"] | Int[Array, "B K N"],
    counts: Int[Array, "B"],
    *,
    mesh: Mesh | None,
    **settings: Any,
) -> Any:
    """`pallas_kernels.gather_blocks`."""
    gather: Any = functools.partial(pallas_kernels.gather_blocks, **settings)
    if mesh is None:
        return gather(k, v, blocks, counts)
    cached = P(DATA, MODEL)
    return _map(gather, mesh, (cached, cached, _lists(blocks), P(DATA)), cached)(
        k, v, blocks, counts
    )


def select_top_k(
    scores: Float[Array, "L b *K N"],
    k: Int[Array, "L b *K"],
    *,
    mesh: Mesh | None,
    **settings: Any,
) -> tuple[Array, Array]:
    """`pallas_kernels.select_top_k`; with one set a layer every device of a model axis finds it."""
    select: Any = functools.partial(pallas_kernels.select_top_k, **settings)
    if mesh is None:
        return select(scores, k)
    rows = rows_axis(mesh, scores.shape[1])
    spec = P(None, rows, MODEL) if scores.ndim == 4 else P(None, rows)
    return _map(select, mesh, (spec, spec), (spec, spec))(scores, k)


def sum_over_experts(
    mix: Any, mesh: Mesh, count: int, x: Float[Array, "b T E"], weights: dict[str, Array]
) -> Float[Array, "b T E"]:
    """The sum over the model axis of mix(x, weights, (first, number)), float32, in x's dtype.

    `weights` are the parameters by name of a mixture of `count` experts. A device gets the whole
    router, and its own experts: so many from `first` on.
    """

    def local(x: Array, weights: dict[str, Array]) -> Array:
        number = count // mesh.shape[MODEL]
        share = (lax.axis_index(MODEL) * number, number)
        return lax.psum(mix(x, weights, share), MODEL).astype(x.dtype)

    rows = P(rows_axis(mesh, x.shape[0]))
    split = {name: P() if name.startswith("router") else P(MODEL) for name in weights}
    return _map(local, mesh, (rows, split), rows)(x, weights)


def _map(function: Any, mesh: Mesh, in_specs: Any, out_specs: Any) -> Any:
    # Whether devices agree on what the specs call whole is not checked: loops and kernels would
    # have to say so.
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def _lists(blocks: Array) -> P:
    return P(DATA, MODEL) if blocks.ndim == 3 else P(DATA)


def _own_slots(slots: Int[Array, "b"], count: int) -> tuple[Int[Array, "b"], Array]:
    """The slots among the `count` sequences of this device, and which of them are among these."""
    local = slots - lax.axis_index(DATA) * count
    own = (local >= 0) & (local < count)
    return jnp.clip(local, 0, count - 1), own


def _like(mask: Array, x: Array) -> Array:
    return jnp.expand_dims(mask, range(1, x.ndim))
