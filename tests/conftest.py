"""Settings for all tests: JAX as strict as can be, hypothesis without chance or deadlines."""

import os

# The suite compiles about a hundred programs and runs each for a moment. LLVM's costlier passes
# change how fast a program is, not what it computes. Read when JAX starts.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

# With the CUDA plugin but no GPU, as where the kernels are compiled for one that is not there, JAX
# would complain of libraries that nothing here loads. Read when JAX starts, too.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

# The emulation of a GPU runs a kernel's warpgroups as programs that wait for one another: with as
# few threads as a small machine has cores, those that wait can keep the others from running.
os.environ.setdefault("NPROC", "32")

import gc
import itertools
from pathlib import Path

import hypothesis
import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("vegas_jax", deadline=None, derandomize=True)
hypothesis.settings.load_profile("vegas_jax")

MAPS = Path("/proc/self/maps")  # on Linux, a line for each piece of memory that is mapped
MOST_MAPS = 50_000  # a process may have 65,530
number = itertools.count(1)


def pytest_runtest_teardown():
    """Forgets compiled programs before they are too many: each is mapped in dozens of pieces.

    LLVM aborts the process when it gets no more.
    """
    if next(number) % 5 == 0 and MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()
