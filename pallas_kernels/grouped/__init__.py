"""Products of groups of rows, each with its own matrix: what a mixture of experts computes."""

from pallas_kernels.grouped.api import grouped_matmul
from pallas_kernels.grouped.mxfp4 import MXFP4, dequantize

__all__ = ["MXFP4", "dequantize", "grouped_matmul"]
