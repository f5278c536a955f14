"""Dense attention over the cache that also scores its keys."""

from pallas_kernels.verify.api import verify_attention

__all__ = ["verify_attention"]
