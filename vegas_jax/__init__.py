"""Lossless long-context decoding in JAX: the model drafts with the keys its own verification chose.

    model, params, tokenizer = vegas_jax.load("codelm-16m")
    generator = vegas_jax.Generator(model, params, tokenizer, max_len=8192)
    completions = generator.generate(["def fibonacci(n):"])

The pure functions underneath are in `vegas_jax.spec`, for use inside your own jit.
"""

from vegas_jax import spec
from vegas_jax.cache import KVCache, init_cache
from vegas_jax.checkpoint import load
from vegas_jax.completion import Completion, Delta, Kind, Stats
from vegas_jax.config import SamplingParams, SpecConfig
from vegas_jax.drafters import Selection
from vegas_jax.errors import CheckpointError, InputError, NonFiniteLogitsError
from vegas_jax.generator import Generator
from vegas_jax.model.config import ModelConfig
from vegas_jax.model.forward import logits
from vegas_jax.model.transformer import Transformer
from vegas_jax.sampling import Processors
from vegas_jax.text import ChatTemplate

__version__ = "0.1.0"

__all__ = [
    "ChatTemplate",
    "CheckpointError",
    "Completion",
    "Delta",
    "Generator",
    "InputError",
    "KVCache",
    "Kind",
    "ModelConfig",
    "NonFiniteLogitsError",
    "Processors",
    "SamplingParams",
    "Selection",
    "SpecConfig",
    "Stats",
    "Transformer",
    "init_cache",
    "load",
    "logits",
    "spec",
]
