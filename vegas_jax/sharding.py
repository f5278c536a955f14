"""Where weights and state live on a mesh of devices: tensor parallel and data parallel.

The axis `model` splits heads, experts, the feed-forward's inner dimension and the vocabulary
(Megatron-LM, arXiv 1909.08053); the axis `data` splits sequences. docs/sharding.md says what is
communicated. `vegas_jax.sharded_ops` has the ops that run on each device's own part.

On a mesh two kinds of matrices have an axis more than `vegas_jax.checkpoint.layout` says, since
their columns are several matrices side by side, which no cut of all columns into equal pieces would
respect (K KV heads, G query heads of each, D head_dim, E hidden size, F intermediate size):

    attn/qkv [E, K, G + 2, D]     for each KV head its queries, its key, its value; split by K
    attn/qkv_bias [K, G + 2, D]
    mlp/gate_up [E, 2, F]         split by F; of experts [X, E, 2 F], as it was, split by X
"""

import functools
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Shaped

from vegas_jax.errors import InputError, check
from vegas_jax.model.config import ModelConfig

if TYPE_CHECKING:
    from vegas_jax.cache import KVCache
    from vegas_jax.model.transformer import Transformer
    from vegas_jax.spec.state import DecodeState

DATA, MODEL = "data", "model"
AXES = (DATA, MODEL)

Params = dict[str, Any]

# By the end of a parameter's path; what is not here, every device has whole.
_SPECS = {
    "embed": P(MODEL),
    "head": P(None, MODEL),
    "attn/qkv": P(None, MODEL),
    "attn/qkv_bias": P(MODEL),
    "attn/sinks": P(MODEL),
    "attn/o": P(MODEL),
    "mlp/gate_up": P(None, None, MODEL),
    "mlp/down": P(MODEL),
} | {
    f"mlp/{matrix}_{part}": P(MODEL)
    for matrix in ("gate_up", "down")
    for part in ("bias", "blocks", "scales")
}


def parse_mesh(text: str) -> Mesh:
    """A mesh over this machine's (or cluster's) devices: `data:2,model:4`; an axis left out is 1.

    Raises:
      InputError: other text, more devices than there are, or, with several processes, fewer.
    """
    sizes = dict.fromkeys(AXES, 1)
    pattern = rf"({DATA}|{MODEL}):([1-9][0-9]{{0,30}})"
    parts = [re.fullmatch(pattern, part.strip()) for part in text.split(",")]
    names = [part[1] for part in parts if part]
    right = all(parts) and len(set(names)) == len(names)
    check(right, "mesh", text, "axes and their sizes, such as data:2,model:4")
    sizes |= {part[1]: int(part[2]) for part in parts if part}
    needed, devices = math.prod(sizes.values()), jax.devices()
    check(needed <= len(devices), "mesh", text, f"of at most the {len(devices)} devices there are")
    if jax.process_count() > 1:
        allowed = f"of all {len(devices)} devices, since each process has some of them"
        check(needed == len(devices), "mesh", text, allowed)
    shape = tuple(sizes[axis] for axis in AXES)
    return jax.make_mesh(shape, AXES, (AxisType.Auto,) * 2, devices=devices[:needed])


def as_mesh(mesh: Mesh) -> Mesh:
    """The mesh with both axes, data first, left to XLA's partitioner (`AxisType.Auto`).

    Raises:
      InputError: it is no mesh, or has an axis of another name.
    """
    kind = "a jax.sharding.Mesh, such as vegas_jax.sharding.parse_mesh makes of text"
    check(isinstance(mesh, Mesh), "mesh", mesh, kind)
    names = mesh.axis_names
    check(set(names) <= set(AXES), "mesh", dict(mesh.shape), "of no axes but data and model")
    devices = mesh.devices if names != AXES[::-1] else mesh.devices.T
    shape = tuple(mesh.shape.get(axis, 1) for axis in AXES)
    return Mesh(devices.reshape(shape), AXES)


def check_divisible(config: ModelConfig, mesh: Mesh) -> None:
    """InputError unless the model axis divides KV heads, experts and feed-forwards."""
    size = mesh.shape[MODEL]
    moe = config.moe
    widths = {"KV heads": config.num_kv_heads}
    if moe is None or len(moe.layers) < config.num_layers:
        widths["intermediate size"] = config.intermediate_size
    if moe is not None:
        widths["experts"] = moe.num_experts
    for name, width in widths.items():
        if width % size:
            raise InputError(
                f"mesh has {size} devices on its model axis, but must have a divisor of the "
                f"model's {name} ({width})"
            )


def check_batch(batch: int, mesh: Mesh | None) -> None:
    """InputError unless the data axis divides the number of sequences."""
    if mesh is not None:
        size = mesh.shape[DATA]
        check(batch % size == 0, "batch", batch, f"a multiple of the mesh's data axis ({size})")


def whole_batch(batch: int, mesh: Mesh) -> int:
    """So many sequences or the next more that the data axis divides."""
    size = mesh.shape[DATA]
    return -(-batch // size) * size


def rows_axis(mesh: Mesh, rows: int) -> str | None:
    """The axis that so many sequences are split over: none unless it divides them."""
    return DATA if rows % mesh.shape[DATA] == 0 else None


def constrain(x: Shaped[Array, "..."], mesh: Mesh | None, *axes: str | None) -> Array:
    """Tells the partitioner which mesh axis each leading axis of x is split over."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))


def constrain_rows(x: Shaped[Array, "b ..."], mesh: Mesh | None) -> Array:
    """Rows of sequences over the data axis, all else whole on every device."""
    return x if mesh is None else constrain(x, mesh, rows_axis(mesh, x.shape[0]))


def constrain_vocabulary(x: Shaped[Array, "b T V"], mesh: Mesh | None) -> Array:
    """Rows over the data axis, and the vocabulary over the model axis if that divides it."""
    if mesh is None or x.shape[-1] % mesh.shape[MODEL]:
        return x
    return constrain(x, mesh, rows_axis(mesh, x.shape[0]), None, MODEL)


def constrain_cache(cache: "KVCache", mesh: Mesh | None) -> "KVCache":
    """Sequences over the data axis, KV heads over the model axis."""
    if mesh is None:
        return cache
    return jax.lax.with_sharding_constraint(cache, cache_shardings(mesh, cache))


def constrain_state(state: "DecodeState", mesh: Mesh | None) -> "DecodeState":
    """Sequences over the data axis, KV heads over the model axis."""
    if mesh is None:
        return state
    return jax.lax.with_sharding_constraint(state, state_shardings(mesh, state))


def cache_shardings(mesh: Mesh, cache: "KVCache") -> "KVCache":
    """The sharding of each array of a cache."""
    layer = (NamedSharding(mesh, P(DATA, MODEL)),) * 2
    return cache.replace(
        layers=tuple(layer for _ in cache.layers), lengths=NamedSharding(mesh, P(DATA))
    )


def state_shardings(mesh: Mesh, state: "DecodeState") -> "DecodeState":
    """The sharding of each array of a state."""
    rows = NamedSharding(mesh, P(DATA))
    selection = state.selection
    if selection is not None:
        per_head = (MODEL,) if selection.blocks.ndim == 4 else ()
        blocks = NamedSharding(mesh, P(None, DATA, *per_head))
        selection = selection.replace(blocks=blocks, counts=rows, tail_start=rows)
    return state.replace(
        cache=cache_shardings(mesh, state.cache),
        requests=jax.tree.map(lambda _: rows, state.requests),
        selection=selection,
    )


def param_shapes(model: "Transformer") -> Params:
    """Shape and dtype of each parameter, as they are without a mesh: a tree like the parameters."""
    config = model.config

    def init() -> Any:
        token = jnp.zeros((1, 1), jnp.int32)
        rows = jnp.zeros((1, config.num_kv_heads, 1, config.head_dim), model.dtype)
        caches = ((rows, rows),) * config.num_layers
        whole, key = model.clone(mesh=None), jax.random.key(0)
        return whole.init(key, token, token, caches, token[0], lambda i, q, *rest: (q, None))

    shapes: Params = jax.eval_shape(init)["params"]
    return shapes


def param_shardings(model: "Transformer") -> Params:
    """The sharding of each parameter on the model's mesh: a tree like the parameters.

    Raises:
      InputError: the model has no mesh.
    """
    mesh, config = model.mesh, model.config
    if mesh is None:
        raise InputError("mesh is None, but must be a mesh for parameters to be split over")
    shapes = param_shapes(model)
    return _map(lambda path, _: NamedSharding(mesh, _spec(config, mesh, path)), shapes)


def stored_shardings(model: "Transformer") -> Params:
    """The same for parameters that have no axis more than without a mesh: what to restore them to.

    Each device then has as much of a parameter as in the end, but of some other columns.
    """

    def flat(path: str, sharding: Any) -> NamedSharding:
        spec = P(None, MODEL) if sharding.spec == P(None, None, MODEL) else sharding.spec
        return NamedSharding(sharding.mesh, spec)

    return _map(flat, param_shardings(model))


def rearrange(model: "Transformer", params: Params) -> Params:
    """Parameters that lie as `stored_shardings` says, as the model's mesh wants them."""
    mesh, config = model.mesh, model.config
    if mesh is None:
        return params

    def move(path: str, leaf: Array) -> Array:
        arranged = functools.partial(_arranged, config, path)
        if jax.eval_shape(arranged, leaf).shape == leaf.shape:
            return leaf
        sharding = NamedSharding(mesh, _spec(config, mesh, path))
        moved: Array = jax.jit(arranged, out_shardings=sharding)(leaf)
        return moved

    return _map(move, params)


def shard_params(model: "Transformer", params: Params) -> Params:
    """Parameters as they are without a mesh, put where the model's mesh has them."""
    return _map(placer(model), params)


def placer(model: "Transformer") -> Callable[[str, Any], Array]:
    """A function of (path, array as without a mesh) that puts a parameter where it belongs.

    Each device gets only its own part; with several processes all must give the same array.
    """
    mesh, config = model.mesh, model.config

    def place(path: str, value: Any) -> Array:
        if mesh is None:
            return jax.device_put(value)
        value = _arranged(config, path, np.asarray(value))
        sharding = NamedSharding(mesh, _spec(config, mesh, path))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return place


def is_placed(model: "Transformer", params: Params) -> bool:
    """Whether parameters lie on the model's mesh, or the model has none."""
    return model.mesh is None or getattr(params["embed"].sharding, "mesh", None) == model.mesh


def _spec(config: ModelConfig, mesh: Mesh, path: str) -> P:
    """How a parameter is split; a vocabulary that cannot be cut evenly stays whole."""
    parent, _, end = path.partition("/")
    if path in ("embed", "head"):
        return _SPECS[path] if config.vocab_size % mesh.shape[MODEL] == 0 else P()
    moe, layer = config.moe, parent.removeprefix("layers_")
    if end == "mlp/gate_up" and moe is not None and int(layer) in moe.layers:
        return P(MODEL)
    return _SPECS.get(end, P())


def _arranged(config: ModelConfig, path: str, value: Any) -> Any:
    """A parameter, of numpy or JAX, in the shape that it has on a mesh."""
    if path.endswith(("attn/qkv", "attn/qkv_bias")):
        numpy: Any = np if isinstance(value, np.ndarray) else jnp
        kv_heads, dim = config.num_kv_heads, config.head_dim
        heads = value.reshape(*value.shape[:-1], -1, dim)
        parts = numpy.split(heads, [config.num_heads, config.num_heads + kv_heads], axis=-2)
        groups = [part.reshape(*part.shape[:-2], kv_heads, -1, dim) for part in parts]
        return numpy.concatenate(groups, axis=-2)
    if path.endswith("mlp/gate_up") and value.ndim == 2:
        return value.reshape(value.shape[0], 2, -1)
    return value


def _map(function: Callable[[str, Any], Any], tree: Params, above: str = "") -> Params:
    """Applies a function of (path, leaf) to every leaf of nested dicts."""
    return {
        name: _map(function, leaf, f"{above}{name}/")
        if isinstance(leaf, dict)
        else function(f"{above}{name}", leaf)
        for name, leaf in tree.items()
    }
