"""Ops for speculative decoding with verification-guided sparse attention, and for its models.

Each op is defined by its `reference.py` and runs through whichever implementation `kernels` names:
`pallas_kernels.dispatch` and docs/kernels.md say which there are. The ops take and return arrays
and know nothing of models. They trace under `jax.jit` with static shapes; only argument checks
happen in Python.

Shape names: B batch, T query tokens, S cache rows, H query heads, K KV heads, G = H / K query heads
of a KV head's group, D head_dim.
"""

from pallas_kernels.grouped import MXFP4, grouped_matmul
from pallas_kernels.select import pool_scores, select_top_k
from pallas_kernels.sparse import gather_blocks, sparse_attention
from pallas_kernels.verify import verify_attention

__all__ = [
    "MXFP4",
    "gather_blocks",
    "grouped_matmul",
    "pool_scores",
    "select_top_k",
    "sparse_attention",
    "verify_attention",
]
