"""How fast a prompt is read, and how well the small model still predicts far into one."""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.workload import Models, Workload
from vegas_jax import SpecConfig, logits
from vegas_jax.compiled import prefill_slot

BUCKET = 8192  # tokens


def matmul_rate(size: int) -> float:
    """Floating-point operations a second of a product of square bfloat16 matrices."""
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    multiply = jax.jit(jnp.matmul)
    jax.block_until_ready(multiply(a, b))
    found = []
    for _ in range(5):
        began = time.perf_counter()
        last = [multiply(a, b) for _ in range(10)][-1]
        jax.block_until_ready(last)
        found.append((time.perf_counter() - began) / 10)
    return 2 * size**3 / statistics.median(found)


def operations(models: Models, tokens: int) -> float:
    """Floating-point operations of reading so many tokens: products with weights, and attention."""
    c = models.wide.config
    layers = {n: x for n, x in models.wide_params.items() if n.startswith("layers_")}
    weights = sum(x.size for x in jax.tree.leaves(layers))
    attended = tokens * (tokens + 1) / 2
    return 2.0 * weights * tokens + 4.0 * c.num_layers * c.num_heads * c.head_dim * attended


def prefill_seconds(models: Models, rows: int) -> tuple[float, int]:
    """Seconds that the wide model takes to read a text of about `rows` tokens, and how many."""
    work = Workload(models, 1, rows, 1)
    text = work.texts[0]
    cache = work.empty(models.wide, SpecConfig()).cache
    found = []
    for _ in range(3):  # the first one compiles
        began = time.perf_counter()
        cache = prefill_slot(models.wide, models.wide_params, cache, text, 0)
        jax.block_until_ready(cache)
        found.append(time.perf_counter() - began)
    return min(found[1:]), len(text)


def loss_by_position(models: Models, rows: int) -> list[float]:
    """The small model's mean negative log-likelihood, in nats, of each 8,192 tokens of a text."""
    text = Workload(models, 1, rows, 1).texts[0]
    tokens = jnp.array([text], jnp.int32)

    @jax.jit
    def losses(params: object, tokens: jax.Array) -> jax.Array:
        found = logits(models.small, params, tokens, jnp.array([len(text)], jnp.int32))
        chosen = jnp.take_along_axis(found[0, :-1], tokens[0, 1:, None], axis=1)[:, 0]
        return jax.nn.logsumexp(found[0, :-1], -1) - chosen

    found = np.asarray(losses(models.small_params, tokens))
    return [float(found[i : i + BUCKET].mean()) for i in range(0, len(found), BUCKET)]
