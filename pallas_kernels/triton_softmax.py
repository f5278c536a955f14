"""Online softmax over tiles of keys, for the attention kernels in Triton (import it lazily).

Logits and log-sum-exp are to base 2, as the hardware has it.
"""

import triton
import triton.language as tl

# Finite, so that a part without keys makes no NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)
TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def accumulate(logits, visible, values, peak, total, acc):
    """Adds a tile of keys to the state of each row.

    Args:
      logits: [rows, keys], float32; whatever stands where a key is not visible is ignored.
      visible: [rows, keys].
      values: [keys, D] without NaN.
      peak: highest logit so far, from LOWEST on, [rows].
      total: sum of exp2(logit - peak) so far, [rows].
      acc: sum of exp2(logit - peak) * value so far, [rows, D].

    Returns:
      The tile's weights exp2(logit - peak) under the new peak, and the new peak, total and acc.
    """
    logits = tl.where(visible, logits, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(logits, axis=1))
    decay = tl.exp2(peak - new_peak)
    weights = tl.exp2(logits - new_peak[:, None])
    total = total * decay + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None])
    return weights, new_peak, total, acc


@triton.jit
def store_part(out_ptr, lse_ptr, row, row_mask, d, peak, total, acc, D: tl.constexpr):
    """Writes a part's output [rows, D] and log-sum-exp [rows], for `splits.combine`."""
    total = tl.maximum(total, TINY)
    out = acc / total[:, None]
    tl.store(out_ptr + row[:, None] * D + d[None, :], out, mask=row_mask[:, None])
    tl.store(lse_ptr + row, peak + tl.log2(total), mask=row_mask)
