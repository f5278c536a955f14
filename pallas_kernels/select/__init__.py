"""From key scores to the set of keys (or key blocks) to keep."""

from pallas_kernels.select.api import select_top_k
from pallas_kernels.select.pool import pool_scores

__all__ = ["pool_scores", "select_top_k"]
