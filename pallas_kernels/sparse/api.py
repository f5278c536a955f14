"""The public `sparse_attention`."""

from collections.abc import Callable

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.checks import (
    as_int32,
    as_scale,
    check_sinks,
    require,
    require_attention_arguments,
    require_cache,
    require_int,
    require_shape,
)
from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.sparse import mosaic_sm90, reference, triton, xla
from pallas_kernels.sparse.xla import GatheredBlocks

Attention = tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]

IMPLEMENTATIONS = {
    "mosaic_gpu": Implementation(mosaic_sm90.sparse_attention, mosaic_sm90.refuses),
    "interpret": Implementation(mosaic_sm90.emulate, mosaic_sm90.refuses),
    "triton": Implementation(triton.sparse_attention, triton.refuses),
    "xla": Implementation(xla.sparse_attention),
    "reference": Implementation(reference.sparse_attention),
}
# Implementations that are not named here read the cache themselves.
GATHERS: dict[Callable[..., Attention], Callable[..., GatheredBlocks]] = {
    xla.sparse_attention: xla.gather_blocks,
}


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
    sinks: Float[Array, " H"] | None = None,
    gathered: GatheredBlocks | None = None,
    scale: float | None = None,
    kernels: str = "auto",
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Grouped-query attention of T tokens over listed key blocks and a contiguous tail.

    The tokens' keys and values already stand in the cache: query t stands at cache row lengths+t.
    It sees the rows of the listed blocks, and the rows tail_start .. lengths+t. Nothing depends on
    other rows, or on list entries from counts on, whatever they hold. Source: the draft step of
    Vegas, arXiv 2602.07223.

    Assumed but unchecked: 0 <= tail_start <= lengths <= S-T, lengths+T-tail_start <= max_tail,
    0 <= counts <= N; the first `counts` entries are different, and their blocks lie below
    tail_start, so that no row is seen twice.

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
      sinks: a logit per query head that enters the softmax and has no value (gpt-oss model card).
      gathered: what `gather_blocks` gave for this list or a longer one that begins with it, while
        the listed rows have not changed: saves gathering them again.
      scale: factor on q.k; None is D**-0.5.
      kernels: which implementation runs, see `pallas_kernels.dispatch`.

    Returns:
      The output, in q's dtype, and the log-sum-exp of each row's scaled logits (and sink),
      float32.

    Raises:
      ValueError: an argument has a wrong shape, type or name.
    """
    require_attention_arguments(q, k, v)
    batch, tokens, _, head_dim = q.shape
    cache_rows = k.shape[2]
    require_shape("q", q, (k.shape[0], *q.shape[1:]))
    blocks, counts = _check_list(k, blocks, counts, block_size)
    lengths = as_int32("lengths", lengths, (batch,))
    tail_start = as_int32("tail_start", tail_start, (batch,))
    sinks = check_sinks(sinks, q)
    require_int("max_tail", max_tail, least=tokens, most=cache_rows)
    scale = as_scale(scale, head_dim)
    if gathered is not None:
        right = isinstance(gathered, GatheredBlocks) and gathered.k.dtype == k.dtype
        least = blocks.shape[2] * block_size
        right = right and gathered.k.shape[2] >= least and gathered.k.shape[:2] == k.shape[:2]
        require(right, "gathered", "must be what `gather_blocks` gave for this cache and list")
    lists = (blocks, counts, lengths, tail_start)
    arguments = (q, k, v, *lists, block_size, max_tail, scale, sinks, gathered)
    return choose(kernels, IMPLEMENTATIONS, *arguments)(*arguments)


def gather_blocks(
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    blocks: Int[Array, "B N"] | Int[Array, "B K N"],
    counts: Int[Array, " B"],
    *,
    block_size: int,
    kernels: str = "auto",
) -> GatheredBlocks | None:
    """Gathers listed blocks once, for several calls of `sparse_attention` with the same list.

    Arguments as there. None where the implementation reads the cache itself and has no use for it.

    Raises:
      ValueError: an argument has a wrong shape, type or name.
    """
    require_cache(k, v)
    blocks, counts = _check_list(k, blocks, counts, block_size)
    batch, kv_heads, _, head_dim = k.shape
    q = jax.ShapeDtypeStruct((batch, 1, kv_heads, head_dim), k.dtype)  # of one query a KV head
    lists = (blocks, counts, counts, counts)
    attend = choose(kernels, IMPLEMENTATIONS, q, k, v, *lists, block_size, 1, 1.0, None, None)
    gather = GATHERS.get(attend)
    return None if gather is None else gather(k, v, blocks, counts, block_size)


def _check_list(
    k: Array, blocks: Array, counts: Array, block_size: int
) -> tuple[Int[Array, "B heads N"], Int[Array, " B"]]:
    batch, kv_heads, cache_rows, _ = k.shape
    blocks, counts = as_int32("blocks", blocks), as_int32("counts", counts, (batch,))
    require(
        blocks.ndim in (2, 3) and blocks.shape[:-1] in ((batch,), (batch, kv_heads)),
        "blocks",
        f"must have shape [{batch}, N] or [{batch}, {kv_heads}, N], but has {blocks.shape}",
    )
    require_int("block_size", block_size, 1)
    require(
        cache_rows % block_size == 0,
        "block_size",
        f"must divide the {cache_rows} cache rows, but is {block_size}",
    )
    return blocks if blocks.ndim == 3 else blocks[:, None, :], counts
