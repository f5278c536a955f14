"""Argument checks shared by the ops: each failure is one sentence that names the argument."""

import jax.numpy as jnp
from jax import Array


def require(condition: bool, name: str, message: str) -> None:
    """Raises ValueError "`name` message" unless the condition holds."""
    if not condition:
        raise ValueError(f"`{name}` {message}.")


def require_shape(name: str, array: Array, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless the array has this shape."""
    require(array.shape == shape, name, f"must have shape {shape}, but has {array.shape}")


def as_int32(name: str, array: Array) -> Array:
    """The array in int32; raises ValueError unless it holds integers."""
    require(
        jnp.issubdtype(array.dtype, jnp.integer),
        name,
        f"must hold integers, but is {array.dtype}",
    )
    return jnp.asarray(array, jnp.int32)


def require_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raises ValueError unless the value is one of the choices."""
    listed = ", ".join(map(repr, choices))
    require(value in choices, name, f"must be one of {listed}, but is {value!r}")


def check_sinks(sinks: Array | None, q: Array) -> Array | None:
    """`sinks` in float32; raises ValueError unless there is one for each of q's heads."""
    if sinks is None:
        return None
    require_shape("sinks", sinks, (q.shape[2],))
    return sinks.astype(jnp.float32)


def require_attention_arguments(q: Array, k: Array, v: Array) -> None:
    """Checks q [b, T, H, D] against the cache k, v [B, K, S, D]."""
    require(q.ndim == 4, "q", f"must have shape [b, T, H, D], but has {q.shape}")
    require(k.ndim == 4, "k", f"must have shape [B, K, S, D], but has {k.shape}")
    require_shape("v", v, k.shape)
    require(
        jnp.issubdtype(q.dtype, jnp.floating), "q", f"must be of a floating type, not {q.dtype}"
    )
    for name, array in (("k", k), ("v", v)):
        require(array.dtype == q.dtype, name, f"must be {q.dtype} like `q`, but is {array.dtype}")
    tokens, heads, head_dim = q.shape[1:]
    kv_heads, cache_rows, cache_head_dim = k.shape[1:]
    require(head_dim == cache_head_dim, "k", f"must have head_dim {head_dim} like `q`")
    require(
        kv_heads >= 1 and heads >= 1 and heads % kv_heads == 0,
        "q",
        f"must have a multiple of the cache's {kv_heads} KV heads, but has {heads} heads",
    )
    require(
        1 <= tokens <= cache_rows,
        "q",
        f"must hold from 1 to {cache_rows} (cache rows) tokens, but holds {tokens}",
    )
