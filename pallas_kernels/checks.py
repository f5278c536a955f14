"""Argument checks shared by the ops: each failure is one sentence that names the argument."""

import numbers
from typing import Any

import jax.numpy as jnp
from jax import Array


def require(condition: bool, name: str, message: str) -> None:
    """Raises ValueError "`name` message" unless the condition holds."""
    if not condition:
        raise ValueError(f"`{name}` {message}.")


def require_shape(name: str, array: Array, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless the array has this shape."""
    require(array.shape == shape, name, f"must have shape {shape}, but has {array.shape}")


def require_array(name: str, value: Any) -> None:
    """Raises ValueError unless it is an array."""
    is_array = hasattr(value, "shape") and hasattr(value, "dtype")
    require(is_array, name, f"must be an array, but is a {type(value).__name__}")


def require_int(name: str, value: Any, least: int, most: int = 2**31 - 1) -> None:
    """Raises ValueError unless it is an integer, known while tracing, from `least` to `most`."""
    is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    valid = is_int and least <= value <= most
    require(valid, name, f"must be an integer from {least} to {most}, but is {value!r}")


def as_scale(scale: Any, head_dim: int) -> float:
    """The factor on q.k; raises ValueError unless it is None or a number known while tracing."""
    if scale is None:
        return head_dim**-0.5
    is_number = isinstance(scale, numbers.Real) and not isinstance(scale, bool)
    require(is_number, "scale", f"must be a number, not an array, but is {scale!r}")
    return float(scale)


def as_int32(name: str, value: Any, shape: tuple[int, ...] | None = None) -> Array:
    """An int32 array; raises ValueError unless it holds integers (and has the shape)."""
    require(value is not None, name, "is missing")
    array = jnp.asarray(value)
    require(
        jnp.issubdtype(array.dtype, jnp.integer),
        name,
        f"must hold integers, but is {array.dtype}",
    )
    if shape is not None:
        require_shape(name, array, shape)
    return array.astype(jnp.int32)


def require_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raises ValueError unless the value is one of the choices."""
    listed = ", ".join(map(repr, choices))
    require(value in choices, name, f"must be one of {listed}, but is {value!r}")


def check_sinks(sinks: Array | None, q: Array) -> Array | None:
    """`sinks` in float32; raises ValueError unless there is one for each of q's heads."""
    if sinks is None:
        return None
    sinks = jnp.asarray(sinks)
    require_shape("sinks", sinks, (q.shape[2],))
    floating = jnp.issubdtype(sinks.dtype, jnp.floating)
    require(floating, "sinks", f"must be of a floating type, not {sinks.dtype}")
    return sinks.astype(jnp.float32)


def require_cache(k: Array, v: Array) -> None:
    """Checks the cache k, v [B, K, S, D]."""
    require_array("k", k)
    require_array("v", v)
    require(k.ndim == 4, "k", f"must have shape [B, K, S, D], but has {k.shape}")
    require(min(k.shape) >= 1, "k", f"must not be empty, but has shape {k.shape}")
    require_shape("v", v, k.shape)


def require_attention_arguments(q: Array, k: Array, v: Array) -> None:
    """Checks q [b, T, H, D] against the cache k, v [B, K, S, D]."""
    require_array("q", q)
    require(q.ndim == 4, "q", f"must have shape [b, T, H, D], but has {q.shape}")
    require(min(q.shape) >= 1, "q", f"must not be empty, but has shape {q.shape}")
    require_cache(k, v)
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
