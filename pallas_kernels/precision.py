"""How exactly products are computed."""

import jax
import jax.numpy as jnp


def precision_of(dtype: jnp.dtype) -> jax.lax.Precision:
    """float32 means float32: by default a GPU multiplies in TF32 and a TPU in bfloat16."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
