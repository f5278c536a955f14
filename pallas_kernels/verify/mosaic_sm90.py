"""`verify_attention` for Hopper (H100, H200): a Pallas Mosaic GPU kernel.

One CTA attends for one KV head to one of several parts of a sequence's keys. A memory warpgroup
copies tiles of keys and values to shared memory; two compute warpgroups take turns at them, so that
the softmax of one tile hides behind the copies and products of the next.

What scores cost. The least that can be written is one number a KV head and block, and where that
number exists it is all that is written. Blocks of a multiple of 8 keys are added up by 8 or, where
16 divides them, by 16:

- mode "logit": the mean over rows and heads of q.k is (the mean of q).k. The mean of the queries,
  as the sum of two numbers of the cache's dtype so that nothing is lost, is one more operand of the
  tensor cores. 4 bytes a key and KV head, 0.8% of what is read at D = 128, 1.6% at D = 64; in
  blocks, an eighth or sixteenth of that.
- mode "weight", in blocks: a row's weights exp(logit - lse) need the row's lse, which is known only
  at the end, so each row must be kept apart; but their sum over a block, relative to the row's
  running maximum, is enough, and the tensor cores add it up while they multiply the same weights
  with the values. For 16 keys, 4/16 bytes a key and row: 0.4% (D = 128, G = 4, 2 tokens) to 1.6%
  (D = 64, G = 8).
- mode "weight", single keys: the weights themselves, relative to the running maximum, as the
  bfloat16 that the product with the values needs anyway (a relative error of 2**-9 at any size,
  where a float16 logit of 20 has 2**-7): 2 bytes a key and row, 3.1% to 12.5%.

All of it goes from registers to the L2 cache, which is asked to keep it (`sm90_stores.py`).
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import splits
from pallas_kernels.verify.key_scores import KeyScores
from pallas_kernels.verify.side_outputs import (
    scores_from_log_sums,
    scores_from_means,
    scores_from_weights,
)

SUMMED_KEYS = (8, 16)  # how many keys' logits or weights are added up for block scores
MAX_ROWS = 128
PROCESSORS = 132


@dataclasses.dataclass(frozen=True)
class Config:
    """How a call is cut up.

    Attributes:
      parts: parts that each sequence's keys are cut into.
      keys: keys of a tile.
      stages: tiles in flight.
      turns: compute warpgroups that take turns at the tiles.
    """

    parts: int
    keys: int
    stages: int
    turns: int

    @classmethod
    def of(cls, batch: int, kv_heads: int, rows: int, head_dim: int, cache_rows: int) -> "Config":
        """As many parts as take the least time, and as many stages as fit in shared memory."""
        # In waves of CTAs, each as long as its tiles and the time of about four to start and end.
        tiles, ctas = cache_rows / 64 * (head_dim / 128), batch * kv_heads
        parts = min(
            range(1, 33), key=lambda parts: -(-ctas * parts // PROCESSORS) * (tiles / parts + 4)
        )
        if rows > 64:
            return cls(parts, 64, 2 if head_dim == 128 else 4, 1)
        if head_dim == 64 and cache_rows % 128 == 0:
            # Half as many steps: 8 x 32K keys with block scores take 135 us, with tiles of 64 keys
            # and three warpgroups 140 (H200).
            return cls(parts, 128, 4, 2)
        return cls(parts, 64, 4 if head_dim == 128 else 6, 2)


def refuses(
    q: Array,
    k: Array,
    v: Array,
    lengths: Array,
    slots: Array | None,
    key_scores: KeyScores | None,
    scale: float,
    window: int | None = None,
    sinks: Array | None = None,
) -> str | None:
    """Why the arguments are outside the kernel's domain."""
    cache_rows = k.shape[2]
    refusal = splits.refuses_queries(q, k, MAX_ROWS)
    if refusal is not None:
        return refusal
    if key_scores is not None and key_scores.mode == "logit" and not key_scores.average_rows:
        return "`scores` must not be 'each' with `score_mode` 'logit'"
    if cache_rows % 64:
        return f"`k` must have a multiple of 64 cache rows, but has {cache_rows},"
    return None


# Layers of one shape share one trace, one lowering and one compiled kernel.
@functools.partial(
    jax.jit, static_argnames=("key_scores", "scale", "window", "config", "interpret")
)
def verify_attention(
    q: Float[Array, "b T H D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    lengths: Int[Array, " b"],
    slots: Int[Array, " b"] | None,
    key_scores: KeyScores | None,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " H"] | None = None,
    config: Config | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "b T H D"], Float[Array, "b T H"], Float[Array, "b *rest S/block"] | None]:
    """See `pallas_kernels.verify_attention`; `interpret` as in `plgpu.kernel`."""
    batch, tokens, heads, head_dim = q.shape
    kv_heads, cache_rows = k.shape[1:3]
    group = heads // kv_heads
    order = splits.token_order(tokens, key_scores.rows if key_scores is not None else ())
    rows = splits.pack(q, kv_heads, order)
    config = config or Config.of(batch, kv_heads, rows.shape[2], head_dim, cache_rows)

    inputs: dict[str, Any] = {"q": rows, "k": k, "v": v, "lengths": lengths}
    if slots is not None:
        inputs["slots"] = slots
    part_shape = (batch, kv_heads, config.parts, rows.shape[2])
    shapes: dict[str, Any] = {
        "out": jax.ShapeDtypeStruct((*part_shape, head_dim), jnp.float32),
        "lse": jax.ShapeDtypeStruct(part_shape, jnp.float32),
    }
    summed = 1 if key_scores is None else math.gcd(key_scores.block, max(SUMMED_KEYS))
    summed = summed if summed in SUMMED_KEYS else 1
    runs = cache_rows // summed
    if key_scores is not None and key_scores.mode == "logit":
        inputs["q"] = jnp.concatenate([rows, _scorer(q, kv_heads, key_scores.rows)], axis=2)
        shapes["logits"] = jax.ShapeDtypeStruct((batch, kv_heads, runs), jnp.float32)
    elif key_scores is not None:
        scored = (batch, kv_heads, len(key_scores.rows) * group)
        if summed > 1:
            inputs["summer"] = _summer(config.keys, summed).astype(q.dtype)
            shapes["sums"] = jax.ShapeDtypeStruct((*scored, runs), jnp.float32)
        else:
            shapes["weights"] = jax.ShapeDtypeStruct((*scored, runs), jnp.bfloat16)
            shape = (batch, kv_heads, cache_rows // config.keys, scored[2])
            shapes["peaks"] = jax.ShapeDtypeStruct(shape, jnp.float32)

    from pallas_kernels.mosaic_tiles import Tiling
    from pallas_kernels.verify import mosaic_sm90_kernel

    tiling = Tiling(rows.shape[2], head_dim, q.dtype, config.keys, config.stages, config.turns)
    run = mosaic_sm90_kernel.build(
        tiling, config.parts, order, group, scale, window, inputs, shapes, interpret
    )
    results = dict(zip(shapes, run(*inputs.values()), strict=True))
    out, lse, packed_lse = splits.combine(
        results["out"], results["lse"], order, group, sinks, q.dtype
    )
    if key_scores is None:
        return out, lse, None
    return out, lse, _scores(results, packed_lse, key_scores, lengths, summed)


def _scores(
    results: dict[str, Array],
    lse: Float[Array, "b K T*G"],
    key_scores: KeyScores,
    lengths: Int[Array, " b"],
    summed: int,
) -> Float[Array, "b *rest S/block"]:
    """Key scores from what the kernel wrote of every `summed` keys."""
    if "logits" in results:
        return scores_from_means(results["logits"][:, :, None], key_scores, lengths, summed)
    if "sums" in results:
        return scores_from_log_sums(results["sums"], lse, key_scores, lengths, summed)
    weights, peaks = results["weights"], results["peaks"].swapaxes(2, 3)  # [b, K, R*G, S / keys]
    factors = jnp.exp2(peaks - lse[:, :, : weights.shape[2], None])
    scaled = weights.astype(jnp.float32).reshape(*factors.shape, -1) * factors[..., None]
    return scores_from_weights(scaled.reshape(weights.shape), key_scores, lengths, summed)


def _summer(keys: int, summed: int) -> np.ndarray:
    """[columns, keys]: a product with its transpose adds up every few columns.

    The tensor cores make a multiple of 8 columns; those past keys / summed are zeros.
    """
    columns = keys // summed
    sums = np.repeat(np.eye(columns, dtype=np.float32), summed, axis=1)
    return np.pad(sums, ((0, -columns % 8), (0, 0)))


def _scorer(
    q: Float[Array, "b T H D"], kv_heads: int, rows: tuple[int, ...]
) -> Float[Array, "b K 8 D"]:
    """The mean query of each KV head: its rounded value, what the rounding left, and six zeros."""
    batch, _, heads, head_dim = q.shape
    chosen = jnp.stack([q[:, t] for t in rows], axis=1).astype(jnp.float32)
    mean = chosen.reshape(batch, -1, kv_heads, heads // kv_heads, head_dim).mean(axis=(1, 3))
    kind = jnp.finfo(q.dtype)
    # Not by way of `astype`: XLA would take the excess precision for a gift.
    rounded = lax.reduce_precision(mean, kind.nexp, kind.nmant)
    pair = jnp.stack([rounded, mean - rounded], axis=2).astype(q.dtype)
    return jnp.pad(pair, ((0, 0), (0, 0), (0, 6), (0, 0)))


def emulate(*arguments: Any) -> Any:
    """`verify_attention` in Pallas's emulation of a GPU, for tests; looks for races."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    params = plgpu.InterpretGPUParams(detect_races=True)
    return functools.partial(verify_attention, interpret=params)(*arguments)
