"""How long a context fits."""

import jax
import jax.numpy as jnp

from benchmarks.gpu.parts import Roofline, compile_decode
from benchmarks.gpu.workload import Models, Workload
from vegas_jax import SpecConfig

HEADROOM = 3 * 2**30  # bytes, for what is neither weights nor cache
STEP = 512  # tokens: cache rows come in so many


def largest_context(models: Models, batch: int, roofline: Roofline, limit: int) -> int:
    """Tokens of each of `batch` sequences that fit into `limit` bytes, by their size."""
    weights = sum(x.nbytes for x in jax.tree.leaves(models.wide_params))
    return int((limit - weights - HEADROOM) // (batch * roofline.row) // STEP * STEP)


def try_context(models: Models, batch: int, rows: int) -> str:
    """Decodes a few rounds with caches of so many rows; says what came of it."""
    work = Workload(models, batch, rows - 32, 32)
    try:
        run = compile_decode(work, SpecConfig())
        state = work.empty(models.wide, SpecConfig())
        # Its last tokens are to come; nothing but their number matters here.
        lengths = jnp.full((batch,), work.length, jnp.int32)
        requests = state.requests.replace(
            done=jnp.zeros((batch,), bool), limit=jnp.full((batch,), 8, jnp.int32)
        )
        state = state.replace(cache=state.cache.replace(lengths=lengths), requests=requests)
        state = run(state, 8)
        emitted = int(state.requests.emitted.min())
    except jax.errors.JaxRuntimeError as error:
        return f"does not fit: {str(error).splitlines()[0][:120]}"
    used = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    return f"fits: {emitted} tokens written, {used / 2**30:.1f} GiB at the most"
