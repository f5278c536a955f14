"""The Mosaic GPU attention kernels in chosen configurations: on a GPU, or emulated on the CPU.

The emulation looks for races. It cannot run the gather of single positions (`sm90_gather.py`):
there the sparse kernel copies them one by one, and the gather itself is tested on a GPU alone.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import sparse_attention, verify_attention
from pallas_kernels.dispatch import compute_capability, has_mosaic_gpu, lacks
from pallas_kernels.sparse import mosaic_sm90 as sparse
from pallas_kernels.verify import mosaic_sm90 as verify
from tests.pallas_kernels.arrays import TOLERANCE, assert_close
from tests.pallas_kernels.cases import (
    SparseCase,
    VerifyCase,
    assert_attention,
    assert_same,
    assert_scores,
    compiled_sparse,
    compiled_verify,
    sparse_reference_of,
    verify_reference_of,
)

pytestmark = pytest.mark.skipif(
    not has_mosaic_gpu() or compute_capability() not in (None, 9.0),
    reason="needs JAX 0.11, and a CPU to emulate on or a Hopper GPU",
)
VerifyConfig, SparseConfig = verify.Config, sparse.Config


@pytest.fixture(autouse=True)
def machine():
    """The kernels' argument `interpret`, if they are to be emulated on this machine."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as emulation
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if lacks("mosaic_gpu") is None:
        yield {}
        return
    emulation.reset_gpu_interpret_mode_state()  # what a failed test has left
    yield {"interpret": plgpu.InterpretGPUParams(detect_races=True)}


def run_to_end(run, arrays):
    """Runs a kernel; fails if it has raced, as far as the emulation sees."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as emulation

    results = jax.block_until_ready(run(*arrays))
    if lacks("mosaic_gpu") is not None:
        assert not emulation.get_races().races_found
    return results


# T 1, 7, 16, G 1, 4, 5, 8; one and two halves of rows; turns 1, 2, 3; stages that come round
# several times (up to 12 tiles in 2 stages); fewer parts than tiles, and more; 0 and S - T keys.
VERIFY_CASES = {
    "logit": (
        VerifyCase(2, 2, 7, 256, 2, 4, 64, "bfloat16", "first+last", "logit", True),
        VerifyConfig(parts=2, keys=64, stages=2, turns=2),
        {"lengths": [0, 249]},
    ),
    "logit-of-two-halves": (
        VerifyCase(1, 1, 16, 448, 1, 8, 128, "bfloat16", "all", "logit", block=8),
        VerifyConfig(parts=1, keys=64, stages=2, turns=1),
        {"lengths": [432]},
    ),
    "logit-of-huge-queries": (
        VerifyCase(1, 1, 1, 192, 2, 4, 128, "bfloat16", "last", "logit", block=16),
        VerifyConfig(parts=2, keys=64, stages=2, turns=2),
        {"lengths": [100], "magnitude": 100.0},
    ),
    "weight-in-blocks": (
        VerifyCase(1, 1, 7, 704, 1, 4, 64, "bfloat16", "first+last", "weight", block=8),
        VerifyConfig(parts=1, keys=64, stages=2, turns=2),
        {"lengths": [697]},
    ),
    "weight-in-blocks-of-two-halves-and-slots": (
        VerifyCase(2, 3, 16, 320, 1, 8, 64, "bfloat16", "last", "weight", block=16),
        VerifyConfig(parts=2, keys=64, stages=2, turns=1),
        {"lengths": [64, 299], "slots": [2, 0]},
    ),
    "weight-in-blocks-of-three-turns": (
        VerifyCase(1, 1, 3, 768, 1, 5, 64, "bfloat16", "each", "weight", True, block=8),
        VerifyConfig(parts=1, keys=128, stages=3, turns=3),
        {"lengths": [690]},
    ),
    "weight-of-keys": (
        VerifyCase(1, 1, 7, 512, 1, 4, 64, "bfloat16", "first+last", "weight"),
        VerifyConfig(parts=1, keys=64, stages=3, turns=3),
        {"lengths": [490]},
    ),
    "weight-of-keys-of-two-halves": (
        VerifyCase(1, 1, 16, 256, 1, 8, 64, "bfloat16", "each", "weight", sinks=True),
        VerifyConfig(parts=2, keys=64, stages=4, turns=1),
        {"lengths": [201]},
    ),
    "weight-of-huge-queries": (
        VerifyCase(1, 1, 1, 192, 1, 4, 64, "float16", "all", "weight", block=8),
        VerifyConfig(parts=1, keys=64, stages=2, turns=2),
        {"lengths": [180], "magnitude": 100.0},
    ),
    "more-parts-than-tiles": (
        VerifyCase(2, 2, 1, 128, 1, 1, 64, "float16", "last", "weight"),
        VerifyConfig(parts=5, keys=64, stages=2, turns=2),
        {"lengths": [0, 127]},
    ),
    "window-and-sinks": (
        VerifyCase(1, 1, 7, 320, 1, 8, 64, "bfloat16", window=70, sinks=True),
        VerifyConfig(parts=3, keys=64, stages=2, turns=2),
        {"lengths": [300]},
    ),
    "window-past-the-start": (
        VerifyCase(2, 2, 1, 256, 1, 8, 128, "bfloat16", window=128, sinks=True),
        VerifyConfig(parts=2, keys=64, stages=4, turns=2),
        {"lengths": [3, 255]},
    ),
    "tiny-queries": (
        VerifyCase(1, 1, 16, 448, 1, 1, 64, "float16"),
        VerifyConfig(parts=1, keys=64, stages=2, turns=1),
        {"lengths": [411], "magnitude": 1e-3},
    ),
}


@pytest.mark.parametrize("name", VERIFY_CASES)
def test_verify_attention_agrees_with_reference(name, machine):
    case, config, values = VERIFY_CASES[name]
    assert case.taken_by("mosaic_gpu")
    values = {"magnitude": 1.0} | values
    clean, poisoned = case.arrays(seed=0, **values)
    run = compiled_verify(
        verify.verify_attention, case.statics(case.mode), config=config, **machine
    )
    actual = run_to_end(run, poisoned)
    expected = verify_reference_of(case)(*clean)
    assert_attention(actual, expected, case, values["magnitude"])
    key_scores = case.key_scores(case.mode)
    assert_scores(actual[2], expected[2], key_scores, "mosaic_gpu", values["magnitude"])


# Lists that are empty, full, or not whole tiles; one for all KV heads or each; a tail that is
# long, short, or reaches S. N rounds up to 1 (of 1) .. 6 (of 40) tiles.
SPARSE_CASES = {
    "singles": (
        SparseCase(1, 2, 256, 1, 8, 64, 1, 100, 56, "bfloat16"),
        SparseConfig(parts=2, stages=2, turns=2),
        {"lengths": [254], "tail_start": [200], "counts": [70]},
    ),
    "blocks-of-8-empty-and-full": (
        SparseCase(2, 1, 512, 2, 4, 64, 8, 40, 32, "bfloat16", per_head=True),
        SparseConfig(parts=1, stages=2, turns=2),
        {"lengths": [5, 511], "tail_start": [0, 480], "counts": [0, 40]},
    ),
    "blocks-of-16": (
        SparseCase(1, 1, 512, 1, 4, 64, 16, 20, 16, "bfloat16"),
        SparseConfig(parts=2, stages=2, turns=2),
        {"lengths": [310], "tail_start": [304], "counts": [18]},
    ),
    "blocks-of-32-no-list": (
        SparseCase(1, 1, 256, 1, 8, 64, 32, 0, 256, "float16"),
        SparseConfig(parts=2, stages=2, turns=2),
        {"lengths": [255], "tail_start": [0], "counts": [0]},
    ),
    "nothing-but-the-token": (
        SparseCase(1, 1, 256, 1, 8, 64, 32, 8, 32, "bfloat16"),
        SparseConfig(parts=4, stages=2, turns=2),
        {"lengths": [0], "tail_start": [0], "counts": [0]},
    ),
    "blocks-of-64-and-sinks": (
        SparseCase(1, 3, 512, 1, 4, 128, 64, 7, 160, "bfloat16", sinks=True),
        SparseConfig(parts=3, stages=2, turns=1),
        {"lengths": [410], "tail_start": [261], "counts": [4]},
    ),
    "huge-queries": (
        SparseCase(1, 1, 512, 2, 4, 128, 16, 9, 64, "float16", per_head=True),
        SparseConfig(parts=1, stages=3, turns=3),
        {"lengths": [499], "tail_start": [448], "counts": [9], "magnitude": 100.0},
    ),
    "many-tiles-of-many-rows": (
        SparseCase(1, 16, 648, 1, 4, 64, 8, 64, 128, "bfloat16"),
        SparseConfig(parts=1, stages=2, turns=2),
        {"lengths": [632], "tail_start": [523], "counts": [63]},
    ),
}


@pytest.mark.parametrize("name", SPARSE_CASES)
def test_sparse_attention_agrees_with_reference(name, machine):
    case, config, values = SPARSE_CASES[name]
    assert case.taken_by("mosaic_gpu")
    values = {"magnitude": 1.0} | values
    clean, poisoned = case.arrays(seed=0, **values)
    run = compiled_sparse(sparse.sparse_attention, case.statics, config=config, **machine)
    actual = run_to_end(run, poisoned)
    assert_attention(actual, sparse_reference_of(case)(*clean), case, values["magnitude"])


def assert_about_the_same(actual, expected, case):
    """The same but for the order of sums and the running maximum that weights are rounded at."""
    assert_close(actual[0], expected[0], TOLERANCE[case.dtype])
    assert_close(actual[1], expected[1], 5e-6)


@pytest.mark.parametrize(
    ("mode", "block", "parts"), [("logit", 1, 2), ("weight", 8, 3), ("weight", 1, 7)]
)
def test_verify_attention_repeats_and_does_not_depend_on_parts(mode, block, parts, machine):
    case = VerifyCase(1, 1, 3, 256, 1, 4, 64, "bfloat16", "first+last", mode, block=block)
    _, poisoned = case.arrays(seed=1, magnitude=1.0, lengths=[240])
    config = VerifyConfig(parts=1, keys=64, stages=2, turns=2)
    runs = [
        compiled_verify(verify.verify_attention, case.statics(mode), config=config, **machine)
        for config in (config, dataclasses.replace(config, parts=parts))
    ]
    whole, split = (run_to_end(run, poisoned) for run in runs)
    assert_about_the_same(split, whole, case)
    assert_scores(split[2], whole[2], case.key_scores(mode), "mosaic_gpu")
    assert_same(run_to_end(runs[1], poisoned), split)


@pytest.mark.parametrize("parts", [2, 9])
def test_sparse_attention_repeats_and_does_not_depend_on_parts(parts, machine):
    case = SparseCase(1, 2, 512, 1, 4, 64, 16, 20, 64, "bfloat16", sinks=True)
    values = {"lengths": [400], "tail_start": [350], "counts": [17]}
    _, poisoned = case.arrays(seed=1, magnitude=1.0, **values)
    config = SparseConfig(parts=1, stages=2, turns=2)
    runs = [
        compiled_sparse(sparse.sparse_attention, case.statics, config=config, **machine)
        for config in (config, dataclasses.replace(config, parts=parts))
    ]
    whole, split = (run_to_end(run, poisoned) for run in runs)
    assert_about_the_same(split, whole, case)
    assert_same(run_to_end(runs[1], poisoned), split)


on_hopper = pytest.mark.skipif(lacks("mosaic_gpu") is not None, reason="needs a Hopper GPU")


@on_hopper
@pytest.mark.parametrize(
    "scores", [None, *((mode, block) for mode in ("logit", "weight") for block in (1, 8, 16))]
)
@pytest.mark.parametrize(("group", "head_dim"), [(4, 128), (8, 64)])
def test_verify_attention_at_a_real_size(group, head_dim, scores):
    mode, block = scores or ("logit", 1)
    which = None if scores is None else "first+last"
    case = VerifyCase(8, 8, 7, 8192, 8, group, head_dim, "bfloat16", which, mode, block=block)
    lengths = [0, 1, 63, 64, 4000, 4096, 8000, 8185]
    clean, poisoned = case.arrays(2, 1.0, lengths)
    run = compiled_verify(verify.verify_attention, case.statics(mode))
    actual, expected = run(*poisoned), verify_reference_of(case)(*clean)
    assert_attention(actual, expected, case)
    assert_scores(actual[2], expected[2], case.key_scores(mode), "mosaic_gpu")
    assert_same(run(*poisoned), actual)


@on_hopper
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("block", sparse.BLOCK_SIZES)
@pytest.mark.parametrize(("group", "head_dim"), [(4, 128), (8, 64)])
def test_sparse_attention_at_a_real_size(group, head_dim, block, per_head):
    size = 2304 // block
    case = SparseCase(4, 1, 8192, 8, group, head_dim, block, size, 256, "bfloat16", per_head)
    lengths, tail_start = [0, 900, 5000, 8191], [0, 800, 4751, 7936]
    counts = [0, 800 // block, size - 1, size]
    clean, poisoned = case.arrays(2, 1.0, lengths, tail_start, counts)
    run = compiled_sparse(sparse.sparse_attention, case.statics)
    actual = run(*poisoned)
    assert_attention(actual, sparse_reference_of(case)(*clean), case)
    assert_same(run(*poisoned), actual)


emulated = pytest.mark.skipif(compute_capability() is not None, reason="emulates on a CPU")


@emulated
def test_the_public_ops_run_to_end():
    verify_case = VerifyCase(1, 1, 2, 128, 1, 2, 64, "bfloat16", "last", "weight", sinks=True)
    (q, k, v, lengths, _, sinks), _ = verify_case.arrays(0, 1.0, [120])
    actual, expected = (
        verify_attention(q, k, v, lengths, scores="last", sinks=sinks, kernels=kernels)
        for kernels in ("interpret", "reference")
    )
    assert_attention(actual, expected, verify_case)
    assert_scores(actual[2], expected[2], verify_case.key_scores("weight"), "interpret")

    sparse_case = SparseCase(1, 1, 128, 1, 2, 64, 16, 4, 32, "bfloat16")
    (*arrays, tail_start, sinks), _ = sparse_case.arrays(0, 1.0, [120], [100], [3])
    settings = {"block_size": 16, "tail_start": tail_start, "max_tail": 32, "sinks": sinks}
    actual, expected = (
        sparse_attention(*arrays, **settings, kernels=kernels)
        for kernels in ("interpret", "reference")
    )
    assert_attention(actual, expected, sparse_case)


@emulated
def test_the_emulation_sees_races(machine, capfd):
    """Two warpgroups that write and read the same shared memory, with no barrier."""
    from jax import lax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(out, scratch):
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _():
            scratch[...] = jnp.ones((128,), jnp.float32)

        @pl.when(warpgroup == 1)
        def _():
            out[...] = scratch[...]

    run = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=[plgpu.SMEM((128,), jnp.float32)],
        num_threads=2,
        thread_name="warpgroup",
        **machine,
    )
    with pytest.raises(AssertionError):
        run_to_end(run, ())
    assert "RACE DETECTED" in capfd.readouterr().out


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float32"},
        {"head_dim": 96},
        {"rows": 100},
        {"tokens": 17, "group": 8},
        {"scores": "each", "mode": "logit"},
    ],
)
def test_verify_attention_names_what_it_refuses(change):
    case = VerifyCase(1, 1, 2, 128, 1, 4, 64, "bfloat16", "last", "weight")
    assert case.taken_by("mosaic_gpu")
    assert not dataclasses.replace(case, **change).taken_by("mosaic_gpu")


@pytest.mark.parametrize(
    "change",
    [{"dtype": "float32"}, {"head_dim": 96}, {"block": 4}, {"rows": 32}, {"tokens": 65}],
)
def test_sparse_attention_names_what_it_refuses(change):
    case = SparseCase(1, 1, 128, 1, 1, 64, 16, 4, 32, "bfloat16")
    assert case.taken_by("mosaic_gpu")
    assert not dataclasses.replace(case, **change).taken_by("mosaic_gpu")
