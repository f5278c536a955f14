"""Settings for all tests: strict JAX promotion, and hypothesis without chance or deadlines."""

import hypothesis
import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("vegas_jax", deadline=None, derandomize=True)
hypothesis.settings.load_profile("vegas_jax")
