"""Models of true shape with random weights: `python -m benchmarks.gpu.random_weights`.

Says whether they fit, and what a plain step, a draft and a verification take against the bytes that
they read: of a mixture of experts the experts that tokens were sent to, which is counted. Random
weights tell nothing about acceptance.
"""

import argparse
import dataclasses
import datetime
import functools
import sys
import zlib
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.command import run, shape
from benchmarks.gpu.parts import (
    MANY_DRAFTS,
    PartPrograms,
    compile_decode,
    draft_keys,
    round_seconds,
    shapes_of,
    state_shapes,
)
from benchmarks.gpu.speed import worker_pool
from benchmarks.gpu.workload import QWEN3_8B, Decoding
from pallas_kernels.bench import timing
from pallas_kernels.bench.__main__ import Parser, versions
from pallas_kernels.bench.table import Table
from pallas_kernels.dispatch import device_name
from vegas_jax import ModelConfig, SpecConfig, Transformer, spec
from vegas_jax.model.config import MoEConfig, RopeScaling
from vegas_jax.model.experts import Experts, route
from vegas_jax.model.forward import Params
from vegas_jax.sharding import param_shapes
from vegas_jax.spec import DecodeState

QWEN3_30B_A3B = ModelConfig(  # model card: Qwen/Qwen3-30B-A3B
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    moe=MoEConfig(128, 8, 768, norm_topk_prob=True, layers=tuple(range(48))),
)
GPT_OSS_20B = ModelConfig(  # model card: openai/gpt-oss-20b
    vocab_size=201088,
    hidden_size=2880,
    intermediate_size=2880,
    num_layers=24,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=150000.0,
    rope_scaling=RopeScaling("yarn", 32.0, 4096, truncate=False),
    qk_norm=False,
    qkv_bias=True,
    o_bias=True,
    sinks=True,
    sliding_windows=(128, None) * 12,
    moe=MoEConfig(
        32,
        4,
        2880,
        norm_topk_prob=True,
        layers=tuple(range(24)),
        biases=True,
        swiglu_limit=7.0,
        packed=True,
    ),
)
MODELS = {"qwen3-8b": QWEN3_8B, "qwen3-30b-a3b": QWEN3_30B_A3B, "gpt-oss-20b": GPT_OSS_20B}
SMALL = ModelConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    sliding_windows=(128, None),
    moe=MoEConfig(8, 2, 64, norm_topk_prob=True, layers=(0, 1), packed=True),
)
SHAPES = [(1, 8192), (8, 8192), (8, 32768)]
SMALL_SHAPES = [(2, 512)]
NEW_TOKENS = 192
SHORTEST = 512  # tokens of a sequence: those that are written, and some before them
PLAIN, VEGAS = SpecConfig(method="plain"), SpecConfig()
VERIFY = f"verify {MANY_DRAFTS + 1}"
SCALE = 120  # of MXFP4, so that weights are about 0.02
COLUMNS = {
    "model": 14,
    "B x S": 10,
    "part": 10,
    "experts": 7,
    "GB read": 7,
    "ms": 8,
    "of roofline": 6,
    "tokens/s": 8,
}


@dataclasses.dataclass(frozen=True, eq=False)
class RandomWorkload(Decoding):
    """Sequences whose keys and values are random too."""

    model: Transformer
    params: Params
    batch: int
    rows: int
    new_tokens: int = NEW_TOKENS
    temperature: float = 0.8

    def begin_large(self, spec: SpecConfig) -> DecodeState:
        """See `Decoding`."""
        shapes = jax.eval_shape(lambda: self.empty(self.model, spec).cache)
        cache = random_like(shapes)
        vocabulary = self.model.config.vocab_size
        tokens = np.random.default_rng(0).integers(vocabulary, size=self.batch, dtype=np.int32)
        return self.begin_with(spec, self.model, self.params, cache, tokens)


def random_like(shapes: Any) -> Any:
    """Arrays of these shapes: normal numbers, random bytes, zeros where they are int32."""
    leaves, tree = jax.tree.flatten(shapes)
    return jax.tree.unflatten(
        tree, [random_array(i, x.shape, x.dtype) for i, x in enumerate(leaves)]
    )


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def random_array(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """One array, see `random_like`."""
    key = jax.random.key(seed)
    if dtype == jnp.uint8:
        return jax.random.bits(key, shape, jnp.uint8)
    if dtype == jnp.int32:
        return jnp.zeros(shape, dtype)
    return jax.random.normal(key, shape, dtype)


def random_params(model: Transformer) -> Params:
    """Normal weights of 0.02, norms of 1, no biases."""

    def leaf(path: Any, x: Any) -> jax.Array:
        name = str(path[-1].key)
        if name == "scale":
            return jnp.ones(x.shape, x.dtype)
        if name.endswith("_scales"):
            return jnp.full(x.shape, SCALE, x.dtype)
        if name.endswith("bias") or name == "sinks":
            return jnp.zeros(x.shape, x.dtype)
        seed = zlib.crc32(jax.tree_util.keystr(path).encode())
        values = random_array(np.uint32(seed), x.shape, x.dtype)
        return values if x.dtype == jnp.uint8 else jnp.multiply(values, 0.02).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(leaf, param_shapes(model))


def compile_count(work: RandomWorkload, tokens: int) -> Any:
    """A step of so many tokens a sequence: (params, cache, ids) -> a layer's chosen experts.

    On average over the layers; experts that several tokens were sent to count once.
    """
    model = work.model

    def count(params: Params, cache: Any, ids: jax.Array) -> jax.Array:
        found = []

        def intercept(run: Any, arguments: Any, settings: Any, context: Any) -> Any:
            module = context.module
            if isinstance(module, Experts) and context.method_name == "__call__":
                x = arguments[0].reshape(-1, module.hidden_size)
                logits = (x @ module.variables["params"]["router"]).astype(jnp.float32)
                chosen, _ = route(module.config, logits)
                touched = jnp.zeros(module.config.num_experts, jnp.int32).at[chosen.ravel()].set(1)
                found.append(touched.sum())
            return run(*arguments, **settings)

        with nn.intercept_methods(intercept):
            spec.verify(model, params, cache, ids, PLAIN)
        return jnp.mean(jnp.stack(found).astype(jnp.float32))

    ids = jax.ShapeDtypeStruct((work.batch, tokens), jnp.int32)
    cache = state_shapes(work, PLAIN).cache
    return jax.jit(count).lower(shapes_of(work.params), cache, ids).compile()


def touched_experts(work: RandomWorkload, program: Any, tokens: int) -> float:
    """How many experts of a layer a step of so many tokens a sequence reads, on average."""
    vocabulary, shape = work.model.config.vocab_size, (work.batch, tokens)
    ids = np.random.default_rng(1).integers(vocabulary, size=shape, dtype=np.int32)
    return float(program(work.params, work.begin_large(PLAIN).cache, jnp.asarray(ids)))


def bytes_read(work: RandomWorkload, keys: int, experts: float) -> float:
    """Bytes that a step reads.

    Args:
      work: what is decoded.
      keys: of each sequence, that layers with full attention read.
      experts: of a layer, that are read.
    """
    c, total = work.model.config, 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(work.params):
        of_experts = c.moe is not None and leaf.ndim > 1 and leaf.shape[0] == c.moe.num_experts
        share = experts / leaf.shape[0] if of_experts else 1.0
        total += 0.0 if path[0].key == "embed" else leaf.nbytes * share
    row = 2 * c.num_kv_heads * c.head_dim * work.model.dtype.itemsize
    for layer in range(c.num_layers):
        window = c.window(layer)
        total += work.batch * row * (keys if window is None else min(window, keys))
    return total


def measure(
    name: str,
    config: ModelConfig,
    shapes: Sequence[tuple[int, int]],
    bandwidth: float,
    chosen: argparse.Namespace,
) -> None:
    """Prints a model's rows."""
    dtype = jnp.dtype(jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32)
    model = Transformer(config, dtype)
    params = jax.block_until_ready(random_params(model))
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    print(f"\n{name}: weights of {size / 1e9:.1f} GB", flush=True)
    works = [RandomWorkload(model, params, batch, rows) for batch, rows in shapes]
    table = Table(COLUMNS)
    steps = {"plain": 1} if chosen.plain else {"plain": 1, "draft": 1, VERIFY: MANY_DRAFTS + 1}
    with worker_pool(chosen.threads) as pool:
        plain = [pool.submit(compile_decode, work, PLAIN) for work in works]
        counts = [
            {tokens: pool.submit(compile_count, work, tokens) for tokens in set(steps.values())}
            for work in works
            if config.moe is not None
        ] or [{}] * len(works)
        parts = [None if chosen.plain else PartPrograms(work, VEGAS, pool) for work in works]
        for future in (*plain, *(program for count in counts for program in count.values())):
            future.result()  # compiling uses the GPU too
        for programs in parts:
            if programs is not None:
                programs.wait()
        for work, plain_program, programs, count in zip(works, plain, parts, counts, strict=True):
            seconds = {"plain": round_seconds(work, PLAIN, plain_program.result())[0]}
            if programs is not None:
                found = programs.measure()
                seconds |= {"draft": found.draft, VERIFY: found.verify}
            touched = {
                tokens: touched_experts(work, program.result(), tokens)
                for tokens, program in count.items()
            }
            for part, taken in seconds.items():
                experts = touched.get(steps[part], 0.0)
                keys = draft_keys(work, VEGAS) // work.batch if part == "draft" else work.length
                read = bytes_read(work, keys, experts)
                table.row(
                    [
                        *(name, f"{work.batch} x {work.rows:,}", part),
                        f"{experts:.1f}" if experts else "",
                        *(f"{read / 1e9:.2f}", f"{taken * 1e3:.3f}"),
                        f"{read / bandwidth / taken:.0%}",
                        f"{work.batch / taken:,.0f}" if part == "plain" else "",
                    ]
                )
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    if peak is not None:
        print(f"at the most {peak / 2**30:.1f} GiB in use", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = Parser(
        "python -m benchmarks.gpu.random_weights", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), help="default all"
    )
    parser.add_argument(
        "--shapes", type=shape, nargs="+", help="BxS ...; default 1x8192 8x8192 8x32768"
    )
    parser.add_argument("--plain", action="store_true", help="no drafts and no verification")
    parser.add_argument("--threads", type=int, default=12, help="that compile; default 12")
    chosen = parser.parse_args(arguments)
    if not 1 <= chosen.threads <= 1024:
        parser.error(f"argument --threads: must be from 1 to 1024, but is {chosen.threads}")
    for batch, rows in chosen.shapes or ():
        if rows < SHORTEST:
            parser.error(f"argument --shapes: {batch}x{rows} has less than {SHORTEST} tokens")
    small = jax.default_backend() != "gpu"
    if small:
        print("There is no GPU here: a small model, whose times mean little.\n")
    print(f"{datetime.date.today()}, {device_name()}, {versions()}")
    bandwidth = max(timing.copy_bandwidth(2**26 if small else 2**31).values())
    print(f"device copy: {bandwidth / 1e12:.3f} TB/s, read + written; rooflines are against that")
    models = {"small": SMALL} if small else {name: MODELS[name] for name in chosen.models}
    for name, config in models.items():
        shapes = chosen.shapes or (SMALL_SHAPES if small else SHAPES)
        measure(name, config, shapes, bandwidth, chosen)
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
