"""Every Mosaic kernel compiles for an H200 at the shapes of real models, and nothing spills.

In the configurations that the kernels choose themselves. `pytest -rP` shows the registers.
"""

import itertools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.sparse import mosaic_sm90 as sparse
from pallas_kernels.verify import mosaic_sm90 as verify
from pallas_kernels.verify.key_scores import KeyScores
from tests.pallas_kernels import h200

pytestmark = pytest.mark.skipif(h200.lacking() is not None, reason=str(h200.lacking()))

BATCH, ROWS = 8, 32_768
# KV heads, group, head_dim.
MODELS = {"qwen3-8b": (8, 4, 128), "gpt-oss": (8, 8, 64)}
LARGER = {"qwen3-32b": (8, 8, 128)}  # for what takes most: T * G of 128
# Scores, mode, block.
FORMS = {
    "none": None,
    "logit": ("first+last", "logit", 16),
    "weight-of-blocks": ("first+last", "weight", 16),
    "weight-of-keys": ("first+last", "weight", 1),
}
array = jax.ShapeDtypeStruct


def attention_shapes(model, tokens, dtype):
    kv_heads, group, head_dim = (MODELS | LARGER)[model]
    cache = array((BATCH, kv_heads, ROWS, head_dim), dtype)
    q = array((BATCH, tokens, kv_heads * group, head_dim), dtype)
    return q, cache, cache


def check(function, shapes, folder, monkeypatch, kernels=1):
    found = h200.compile_kernels(function, shapes, folder, monkeypatch)
    print(*found, sep="\n")
    assert len(found) == kernels
    for resources in found:
        assert resources.spilled_bytes == 0
        assert resources.shared_bytes <= h200.SHARED_BYTES


def check_verify(model, tokens, form, folder, monkeypatch, dtype="bfloat16", window=None):
    key_scores = None
    if form is not None:
        scores, mode, block = form
        key_scores = KeyScores.of(scores, tokens, mode, False, block)
    q, k, v = attention_shapes(model, tokens, dtype)
    shapes = (q, k, v, array((BATCH,), jnp.int32), array(q.shape[2:3], jnp.float32))

    def run(q, k, v, lengths, sinks):
        return verify.verify_attention(q, k, v, lengths, None, key_scores, 0.1, window, sinks)

    assert verify.refuses(q, k, v, None, None, key_scores, 0.1, window) is None
    check(run, shapes, folder, monkeypatch)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("model", "tokens"), [*itertools.product(MODELS, [1, 7, 16]), ("qwen3-32b", 16)]
)
def test_verify_attention(model, tokens, form, tmp_path, monkeypatch):
    check_verify(model, tokens, FORMS[form], tmp_path, monkeypatch)


@pytest.mark.parametrize("model", [*MODELS, *LARGER])
def test_verify_attention_that_scores_for_each_token(model, tmp_path, monkeypatch):
    check_verify(model, 16, ("each", "weight", 1), tmp_path, monkeypatch)


@pytest.mark.parametrize("tokens", [1, 7, 16])
def test_verify_attention_with_a_window(tokens, tmp_path, monkeypatch):
    check_verify("gpt-oss", tokens, None, tmp_path, monkeypatch, window=128)


def test_verify_attention_in_float16(tmp_path, monkeypatch):
    check_verify("qwen3-8b", 7, FORMS["weight-of-blocks"], tmp_path, monkeypatch, "float16")


@pytest.mark.parametrize(
    ("model", "block_size", "tokens"),
    [(model, block, 1) for model in MODELS for block in sparse.BLOCK_SIZES]
    + [("qwen3-8b", 16, 16), ("gpt-oss", 1, 7)],
)
def test_sparse_attention(model, block_size, tokens, tmp_path, monkeypatch):
    q, k, v = attention_shapes(model, tokens, "bfloat16")
    index = array((BATCH,), jnp.int32)
    blocks = array((BATCH, 1, 2048 // block_size), jnp.int32)
    shapes = (q, k, v, blocks, index, index, index, array(q.shape[2:3], jnp.float32))

    def run(q, k, v, blocks, counts, lengths, tail_start, sinks):
        lists = (blocks, counts, lengths, tail_start)
        return sparse.sparse_attention(q, k, v, *lists, block_size, 256, 0.1, sinks)

    assert sparse.refuses(q, k, v, blocks, index, index, index, block_size, 256, 0.1) is None
    check(run, shapes, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("rows", "size", "max_k"),
    [
        (8, 2048, 144),  # blocks of 16 keys, for one layer
        (288, 2048, 144),  # and for 36 layers at once
        (8, 32_768, 2304),  # single keys
        (288, 32_768, 2304),
        (144, 98_304, 6912),
        (1, 131_072, 8192),
        (8, 131_072, 8192),
        (1, 262_144, 8192),
        (288, 262_144, 8192),
    ],
)
def test_select_top_k(rows, size, max_k, tmp_path, monkeypatch):
    from pallas_kernels.select import mosaic_sm90 as select

    shapes = (array((rows, size), jnp.float32), array((rows,), jnp.int32))
    check(lambda scores, k: select.select_top_k(scores, k, max_k), shapes, tmp_path, monkeypatch)


def check_config(config, folder, monkeypatch):
    q, k, v = attention_shapes("qwen3-8b", 7, "bfloat16")

    def run(q, k, v, lengths):
        return verify.verify_attention(q, k, v, lengths, None, None, 0.1, config=config)

    check(run, (q, k, v, array((BATCH,), jnp.int32)), folder, monkeypatch)


def test_finds_what_does_not_fit(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="shared memory"):
        check_config(verify.Config(2, 64, 8, 2), tmp_path, monkeypatch)


def test_finds_spills(tmp_path, monkeypatch):
    with pytest.raises(AssertionError, match="spilled_bytes"):
        check_config(verify.Config(2, 128, 2, 2), tmp_path, monkeypatch)
