"""Plain decoding by others, at the same size."""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.parts import shapes_of, state_shapes, time_loop
from benchmarks.gpu.workload import Workload
from vegas_jax import KVCache, SpecConfig
from vegas_jax.model.forward import forward, unembed

PLAIN = SpecConfig(method="plain")


def transformers_steps(shapes: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Seconds of a step of transformers by shape, "BxS", or what went wrong; and versions.

    To be called before JAX takes the GPU's memory.
    """
    packages = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
    if not packages or shutil.which("nvidia-smi") is None:
        return {"not run": "needs an NVIDIA GPU and the packages torch and transformers"}
    names = [f"{batch}x{rows}" for batch, rows in shapes]
    command = [sys.executable, "-m", "benchmarks.gpu.transformers_peer", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compile_cudnn(work: Workload) -> Any:
    """A loop of greedy steps whose attention is cuDNN's; for `time_loop`."""
    from pallas_kernels.verify.cudnn import flash_attention

    model = work.model

    def run(params: Any, carry: tuple[KVCache, jax.Array], count: Any) -> Any:
        def step(_: Any, carry: tuple[KVCache, jax.Array]) -> tuple[KVCache, jax.Array]:
            cache, token = carry

            def attend(layer: int, q: Any, k: Any, v: Any, sinks: Any) -> tuple[Any, None]:
                queries, lengths = q.swapaxes(1, 2), cache.lengths + 1
                out, _ = flash_attention(
                    queries, k, v, model.config.head_dim**-0.5, lengths=lengths
                )
                return out.swapaxes(1, 2), None

            hidden, cache, _ = forward(model, params, cache, token[:, None], cache.lengths, attend)
            token = jnp.argmax(unembed(model, params, hidden)[:, 0], axis=-1).astype(jnp.int32)
            return cache.replace(lengths=cache.lengths + 1), token

        cache, token = jax.lax.fori_loop(0, count, step, carry)
        return (cache, token), token

    state = state_shapes(work, PLAIN)
    carry = (state.cache, state.requests.pending)
    params = shapes_of(work.params)
    return jax.jit(run, donate_argnames="carry").lower(params, carry, 0).compile()


def cudnn_step_seconds(work: Workload, program: Any) -> float:
    """Seconds of a step."""
    state = work.begin_large(PLAIN)
    carry = (state.cache, state.requests.pending)
    return time_loop(program, work.params, carry, 16)[1]
