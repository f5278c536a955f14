"""Settings for all tests: JAX as strict as can be, hypothesis without chance or deadlines."""

import os

# The suite compiles about a hundred programs and runs each for a moment. LLVM's costlier passes
# change how fast a program is, not what it computes. Read when JAX starts.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=1"

# With the CUDA plugin but no GPU, as where the kernels are compiled for one that is not there, JAX
# would complain of libraries that nothing here loads. Read when JAX starts, too.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

# The emulation of a GPU runs a kernel's warpgroups as programs that wait for one another: with as
# few threads as a small machine has cores, those that wait can keep the others from running.
os.environ.setdefault("NPROC", "32")

import hypothesis
import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("vegas_jax", deadline=None, derandomize=True)
hypothesis.settings.load_profile("vegas_jax")
