"""Joining attention over different parts of the cache, for kernels that split it.

A kernel packs the query tokens and the query heads that share a KV head into rows, computes each
part's output and log-sum-exp, and leaves the rest to this module. Logarithms are to base 2, as the
hardware has it. Combining by log-sum-exp is Flash-Decoding's.
"""

import math

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

LOG2_E = math.log2(math.e)
ROW_TILE = 8  # packed rows are padded to a multiple of this


def refuses_queries(q: Array, k: Array, max_rows: int) -> str | None:
    """Why kernels that take at most `max_rows` packed rows do not take these queries."""
    _, tokens, heads, head_dim = q.shape
    group = heads // k.shape[1]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"`q` must be bfloat16 or float16, but is {q.dtype},"
    if head_dim not in (64, 128):
        return f"`q` must have head_dim 64 or 128, but has {head_dim},"
    if tokens * group > max_rows:
        return (
            f"`q` must have at most {max_rows} query tokens times query heads a KV head, "
            f"but has {tokens} * {group},"
        )
    return None


def token_order(tokens: int, first: tuple[int, ...]) -> tuple[int, ...]:
    """Query tokens in the order in which rows are packed: those named, then the others."""
    return (*first, *(t for t in range(tokens) if t not in first))


def padded(rows: int) -> int:
    """Packed rows, padded."""
    return -(-rows // ROW_TILE) * ROW_TILE


def pack(
    q: Float[Array, "b T H D"], kv_heads: int, order: tuple[int, ...]
) -> Float[Array, "b K R D"]:
    """Queries by KV head; row i * G + g is query head g of token order[i], rows past T*G are 0."""
    batch, tokens, heads, head_dim = q.shape
    if order != tuple(range(tokens)):
        q = jnp.stack([q[:, t] for t in order], axis=1)
    rows = q.reshape(batch, tokens, kv_heads, heads // kv_heads, head_dim).swapaxes(1, 2)
    rows = rows.reshape(batch, kv_heads, -1, head_dim)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, padded(rows.shape[2]) - rows.shape[2]), (0, 0)))


def unpack(rows: Float[Array, "b K R *D"], order: tuple[int, ...]) -> Float[Array, "b T H *D"]:
    """Undoes `pack`, with any trailing axes; rows past T*G are dropped."""
    batch, kv_heads, packed, *rest = rows.shape
    tokens = len(order)
    rows = rows.reshape(batch, kv_heads, tokens, packed // tokens, *rest).swapaxes(1, 2)
    if order != tuple(range(tokens)):
        rows = jnp.stack([rows[:, order.index(t)] for t in range(tokens)], axis=1)
    return rows.reshape(batch, tokens, -1, *rest)


def combine(
    out: Float[Array, "b K P R D"],
    lse: Float[Array, "b K P R"],
    order: tuple[int, ...],
    group: int,
    sinks: Float[Array, " H"] | None,
    dtype: DTypeLike,
) -> tuple[Float[Array, "b T H D"], Float[Array, "b T H"], Float[Array, "b K T*G"]]:
    """Attention over all parts from that over each.

    Written part by part, so that XLA makes one elementwise kernel of it.

    Args:
      out: softmax-weighted values of each part, for packed rows.
      lse: log-sum-exp of each part's logits, base 2; very negative for a part without keys.
      order: of the packed tokens, see `token_order`.
      group: G, query heads of a KV head.
      sinks: a logit (base e) per query head that has no value.
      dtype: of the output.

    Returns:
      The output, and the float32 log-sum-exp to base e.
    """
    _, kv_heads, parts, _, _ = out.shape
    rows = len(order) * group
    logs = [lse[:, :, part, :rows] for part in range(parts)]
    if sinks is not None:
        sink = jnp.tile(sinks.reshape(kv_heads, group) * LOG2_E, (1, len(order)))
        logs.append(jnp.broadcast_to(sink[None], logs[0].shape))
    peak = logs[0]
    for log in logs[1:]:
        peak = jnp.maximum(peak, log)
    weights = [jnp.exp2(log - peak) for log in logs]
    total = sum(weights[1:], weights[0])
    values = sum(
        (weight[..., None] * out[:, :, part, :rows] for part, weight in enumerate(weights[:parts])),
        jnp.zeros((), jnp.float32),
    )
    joined = unpack(values / total[..., None], order).astype(dtype)
    joined_lse = peak + jnp.log2(total)
    return joined, unpack(joined_lse / LOG2_E, order), joined_lse
