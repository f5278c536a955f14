"""Triton's compiler on the kernels, which needs no GPU: the interpreter takes more than it does."""

import functools
import importlib.util
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.grouped import MXFP4
from pallas_kernels.grouped import triton as grouped_triton
from pallas_kernels.select import triton as select_triton
from pallas_kernels.sparse import triton as sparse_triton
from pallas_kernels.verify import triton as verify_triton
from pallas_kernels.verify.key_scores import KeyScores

# Compute capability and the shared memory that a program can have: on Ada less than on Ampere,
# whose code it runs.
MACHINES = {80: 99 * 1024, 90: 227 * 1024}
SIXTEEN_BYTES = [["tt.divisibility", 16]]  # what jax-triton promises of pointers


def compile_instead(machine, kernel, inputs, outputs, grid, *, num_warps, num_stages, **constants):
    """In place of `pallas_kernels.triton_calls.launch`."""
    import triton
    from triton.backends.compiler import GPUTarget

    types = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}
    types |= {"int32": "*i32", "uint32": "*u32", "uint8": "*u8"}
    arrays = zip(kernel.arg_names, (*inputs, *outputs), strict=False)
    signature = {name: types[str(x.dtype)] for name, x in arrays}
    attributes = {(i,): SIXTEEN_BYTES for i in range(len(signature))}
    signature |= dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    built = triton.compile(source, target=GPUTarget("cuda", machine, 32), options=options)
    assert built.metadata.shared <= MACHINES[machine], (kernel, machine, built.metadata.shared)
    return [jnp.zeros(x.shape, x.dtype) for x in outputs]


def compile_all(machine):
    """The kernels at the largest tiles, and at those of a draft."""
    for module in (grouped_triton, select_triton, sparse_triton, verify_triton):
        module.launch = functools.partial(compile_instead, machine)
    shape = jax.ShapeDtypeStruct

    def attention(dtype, tokens, head_dim, *others):
        cache = shape((2, 2, 512, head_dim), dtype)
        rest = (shape(other, jnp.int32) for other in others)
        return shape((2, tokens, 16, head_dim), dtype), cache, cache, *rest

    for scores, mode, block in [("all", "weight", 1), ("last", "weight", 16), ("each", "logit", 1)]:
        jax.eval_shape(
            functools.partial(
                verify_triton.verify_attention,
                key_scores=KeyScores.of(scores, 16, mode, False, block),
                scale=1.0,
            ),
            *attention(jnp.bfloat16, 16, 128, (2,), (2,)),
        )
    settings = {"key_scores": None, "scale": 1.0, "window": 100}
    run = functools.partial(verify_triton.verify_attention, **settings)
    jax.eval_shape(run, *attention(jnp.float16, 1, 64, (2,), (2,)))
    for tokens, block in [(16, 16), (1, 1)]:
        settings = {"block_size": block, "max_tail": 64, "scale": 1.0}
        run = functools.partial(sparse_triton.sparse_attention, **settings)
        lists = ((2, 2, 32), (2,), (2,), (2,))
        jax.eval_shape(run, *attention(jnp.bfloat16, tokens, 128, *lists))
    for size in (20_000, 1):
        run = functools.partial(select_triton.select_top_k, max_k=2000)
        jax.eval_shape(run, shape((2, size), jnp.float32), shape((2,), jnp.int32))
    sizes = shape((32,), jnp.int32)
    blocks = shape((32, 5760, 90, 16), jnp.uint8)
    for rows in (4, 32 * 40, 32 * 200):
        weights = MXFP4(blocks, shape(blocks.shape[:3], jnp.uint8))
        for dtype in (jnp.bfloat16, jnp.float16):
            x = shape((rows, 2880), dtype)
            for matrices in (weights, shape((32, 2880, 2880), dtype)):
                jax.eval_shape(grouped_triton.grouped_matmul, x, matrices, sizes)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("machine", MACHINES)
def test_compiles_and_fits(machine, tmp_path):
    # Another process, since in this one Triton may be an interpreter.
    command = [sys.executable, "-m", "tests.pallas_kernels.test_triton_compiles", str(machine)]
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    compile_all(int(sys.argv[1]))
