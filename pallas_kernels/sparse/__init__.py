"""Attention over a list of key blocks and a contiguous tail."""

from pallas_kernels.sparse.api import sparse_attention

__all__ = ["sparse_attention"]
