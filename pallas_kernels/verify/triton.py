"""`verify_attention` for NVIDIA GPUs from Ampere to Hopper: a Triton kernel.

A program attends for one KV head to one of several parts of a sequence's keys; the parts are joined
afterwards. For key scores it also writes, in float32, the least that can be written:

- mode "logit": the mean of the scored rows' logits, one number a key and KV head (for "each", a
  key, KV head and token).
- mode "weight": a row's weights need the row's log-sum-exp, which is known only at the end, so each
  scored row is kept apart: its logits, or their log-sum-exps over as many neighbouring keys of a
  block as divide a tile.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import splits
from pallas_kernels.triton_calls import KEYS, MAX_ROWS, Config, launch, token_of_packed_row
from pallas_kernels.verify.key_scores import KeyScores
from pallas_kernels.verify.side_outputs import scores_from_log_sums, scores_from_means


def refuses(q: Array, k: Array, *rest: object) -> str | None:
    """Why the arguments are outside the kernel's domain."""
    del rest
    return splits.refuses_queries(q, k, MAX_ROWS)


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
) -> tuple[Float[Array, "b T H D"], Float[Array, "b T H"], Float[Array, "b *rest S/block"] | None]:
    """See `pallas_kernels.verify_attention`."""
    from pallas_kernels.verify.triton_kernel import verify_kernel

    batch, tokens, heads, head_dim = q.shape
    kv_heads, cache_rows = k.shape[1:3]
    group = heads // kv_heads
    order = splits.token_order(tokens, key_scores.rows if key_scores is not None else ())
    rows = splits.pack(q, kv_heads, order)
    packed = rows.shape[2]
    if slots is None:
        slots = jnp.arange(batch, dtype=jnp.int32)
    config = config or Config.of(batch, kv_heads, packed, head_dim, cache_rows)

    def float32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, kv_heads, *shape), jnp.float32)

    outputs = [float32(config.parts, packed, head_dim), float32(config.parts, packed)]
    tiles = -(-cache_rows // KEYS)
    scored, entries, summed = 0, None, None
    if key_scores is not None:
        scored = len(key_scores.rows) * group
        if key_scores.mode == "logit":
            entries = 1 if key_scores.average_rows else len(key_scores.rows)
            outputs.append(float32(entries, tiles * KEYS))
        else:
            summed = math.gcd(key_scores.block, KEYS)
            outputs.append(float32(scored, tiles * KEYS // summed))

    out, lse, *scores = launch(
        verify_kernel,
        (rows, k, v, lengths, slots, token_of_packed_row(order, group, config.row_tile)),
        outputs,
        (kv_heads, config.parts, batch),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        KV_HEADS=kv_heads,
        CACHE_ROWS=cache_rows,
        D=head_dim,
        TOKENS=tokens,
        ROWS=packed,
        ROW_TILE=config.row_tile,
        KEYS=KEYS,
        PARTS=config.parts,
        SCALE=scale,
        LOG2_E=splits.LOG2_E,
        WINDOW=window,
        SCORED=scored,
        ENTRIES=entries,
        SUMMED=summed,
        **({"scores_ptr": None} if key_scores is None else {}),
    )
    out, lse, packed_lse = splits.combine(out, lse, order, group, sinks, q.dtype)
    if key_scores is None:
        return out, lse, None
    (written,) = scores
    if summed is None:
        return out, lse, scores_from_means(written[..., :cache_rows], key_scores, lengths)
    written = written[..., : cache_rows // summed]
    return out, lse, scores_from_log_sums(written, packed_lse, key_scores, lengths, summed)
