"""Attention over a list of key blocks and a contiguous tail."""

from pallas_kernels.sparse.api import gather_blocks, sparse_attention

__all__ = ["gather_blocks", "sparse_attention"]
