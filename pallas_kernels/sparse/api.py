"""The public `sparse_attention`."""

from jaxtyping import Array, Float, Int

from pallas_kernels.checks import (
    as_int32,
    require,
    require_attention_arguments,
    require_shape,
)
from pallas_kernels.dispatch import choose
from pallas_kernels.sparse import reference, xla

IMPLEMENTATIONS = {"xla": xla.sparse_attention, "reference": reference.sparse_attention}


def sparse_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    blocks: Int[Array, "B N"] | Int[Array, "B K N"],
    counts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    block_size: int,
    tail_start: Int[Array, " B"],
    max_tail: int,
    scale: float | None = None,
    kernels: str = "auto",
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Grouped-query attention of T tokens over listed key blocks and a contiguous tail.

    The tokens' keys and values already stand in the cache: query t stands at cache row lengths+t.
    It sees the rows of the listed blocks that are below tail_start, and the rows tail_start ..
    lengths+t. Nothing depends on other rows, or on list entries from counts on, whatever they
    hold. Source: the draft step of Vegas, arXiv 2602.07223.

    Assumed but unchecked: 0 <= tail_start <= lengths <= S-T, lengths+T-tail_start <= max_tail,
    0 <= counts <= N; the first `counts` entries are different, and their blocks begin below
    tail_start.

    Args:
      q: queries.
      k: cached keys, of the same dtype as q.
      v: cached values, likewise.
      blocks: indices of blocks; block i is the cache rows i*block_size .. (i+1)*block_size-1. One
        list for all heads, or one per KV head.
      counts: how many entries of the list count.
      lengths: how many keys come before the tokens.
      block_size: cache rows in a block; divides S.
      tail_start: first cache row of the tail.
      max_tail: static bound on the rows of the tail, the tokens' own included.
      scale: factor on q.k; None is D**-0.5.
      kernels: "auto", "xla" or "reference".

    Returns:
      The output, in q's dtype, and the log-sum-exp of each row's scaled logits, float32.

    Raises:
      ValueError: an argument has a wrong shape, type or name.
    """
    implementation = choose(kernels, IMPLEMENTATIONS)
    require_attention_arguments(q, k, v)
    batch, tokens, _, head_dim = q.shape
    kv_heads, cache_rows = k.shape[1:3]
    require_shape("q", q, (k.shape[0], *q.shape[1:]))
    require(
        blocks.ndim in (2, 3) and blocks.shape[:-1] in ((batch,), (batch, kv_heads)),
        "blocks",
        f"must have shape [{batch}, N] or [{batch}, {kv_heads}, N], but has {blocks.shape}",
    )
    for name, array in (("counts", counts), ("lengths", lengths), ("tail_start", tail_start)):
        require_shape(name, array, (batch,))
    counts, lengths = as_int32("counts", counts), as_int32("lengths", lengths)
    tail_start, blocks = as_int32("tail_start", tail_start), as_int32("blocks", blocks)
    require(
        block_size >= 1 and cache_rows % block_size == 0,
        "block_size",
        f"must divide the {cache_rows} cache rows, but is {block_size}",
    )
    require(
        tokens <= max_tail <= cache_rows,
        "max_tail",
        f"must be from {tokens} (query tokens) to {cache_rows} (cache rows), but is {max_tail}",
    )
    blocks = blocks if blocks.ndim == 3 else blocks[:, None, :]
    scale = head_dim**-0.5 if scale is None else scale
    return implementation(q, k, v, blocks, counts, lengths, tail_start, block_size, max_tail, scale)
