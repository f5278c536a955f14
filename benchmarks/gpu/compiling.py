"""How long the loop takes to compile: from nothing, and from JAX's persistent cache.

Each in a process of its own, `python -m benchmarks.gpu.compiling 8x32768`, as a user starts them.
Mosaic numbers the kernels of a process, so that a program lowered once more in the same process
would be another one to the cache.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax

import vegas_jax
from benchmarks.gpu.parts import compile_decode
from benchmarks.gpu.workload import QWEN3_8B, SMALL, Models, Workload
from benchmarks.widen import widen
from vegas_jax import SpecConfig
from vegas_jax.model.transformer import Transformer


def compile_seconds(batch: int, rows: int) -> tuple[float, float]:
    """Of vegas' whole loop, from Python to a program: the first time, and from JAX's cache."""
    command = [sys.executable, "-m", "benchmarks.gpu.compiling", f"{batch}x{rows}"]
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "JAX_COMPILATION_CACHE_DIR": folder,
            # This process has most of the GPU's memory.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }

        def once() -> float:
            environment = os.environ | settings
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            return float(done.stdout.splitlines()[-1])

        return once(), once()


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the seconds; of the weights there are only shapes."""
    (shape,) = sys.argv[1:] if arguments is None else arguments
    batch, rows = map(int, shape.split("x"))
    gpu = jax.default_backend() == "gpu"
    small, params, tokenizer = vegas_jax.load(dtype="bfloat16" if gpu else "float32")
    assert tokenizer is not None
    wide: list[Transformer] = []

    def grow(params: Any) -> Any:
        model, grown = widen(small, params, QWEN3_8B if gpu else SMALL)
        wide.append(model)
        return grown

    grown = jax.eval_shape(grow, params)
    work = Workload(Models(small, params, wide[0], grown, tokenizer), batch, rows, 256)
    began = time.perf_counter()
    compile_decode(work, SpecConfig())
    print(time.perf_counter() - began)


if __name__ == "__main__":
    main()
