"""A small random model whose attention is sharp, so that sparse drafts are often wrong."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from vegas_jax import ModelConfig, Transformer, init_cache

CONFIG = ModelConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    tie_word_embeddings=True,
    max_position_embeddings=65536,
)
MODEL = Transformer(CONFIG)


@functools.cache
def params(config: ModelConfig = CONFIG, seed: int = 0, sharpness: float = 6.0):
    """Random weights; `sharpness` scales the matrices up from their initial 0.02, but no bytes."""
    model = Transformer(config)
    tokens = jnp.zeros((1, 1), jnp.int32)
    caches = init_cache(config, 1, 8, model.dtype).layers

    @jax.jit  # one program, not a hundred
    def init(key):
        return model.init(key, tokens, tokens, caches, tokens[0], lambda i, q, *rest: (q, None))

    variables = init(jax.random.key(seed))
    return jax.tree.map(
        lambda w: w * sharpness if w.ndim > 1 and w.dtype == model.dtype else w, variables["params"]
    )


def prompts(lengths, vocab_size: int = CONFIG.vocab_size, seed: int = 0) -> list[list[int]]:
    """Random prompts of the given lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, n).tolist() for n in lengths]
