"""How long the loop takes to compile, and how long a context fits."""

import tempfile
import time

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache

from benchmarks.gpu.parts import Roofline, compile_decode
from benchmarks.gpu.workload import Models, Workload
from vegas_jax import SpecConfig

HEADROOM = 3 * 2**30  # bytes, for what is neither weights nor cache
STEP = 512  # tokens: cache rows come in so many


def compile_seconds(work: Workload) -> tuple[float, float]:
    """Of vegas' whole loop, from Python to a program: the first time, and from JAX's cache."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        old = jax.config.jax_compilation_cache_dir
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()
        for _ in range(2):
            jax.clear_caches()
            began = time.perf_counter()
            compile_decode(work, SpecConfig())
            found.append(time.perf_counter() - began)
        jax.config.update("jax_compilation_cache_dir", old)
        compilation_cache.reset_cache()
    return found[0], found[1]


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
