"""Prefill through cuDNN: all but cuDNN itself, for which plain jnp stands in."""

import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import dispatch, verify_attention
from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.verify import cudnn, reference
from tests.pallas_kernels.arrays import (
    POISONS,
    SEEDS,
    TOLERANCE,
    assert_close,
    random_attention,
)

TILE = 128  # keys that cuDNN multiplies at a time


def stand_in(q, k, v, scale, *, lengths=None, pages=None, window=None):
    """What `cudnn.flash_attention` promises, and no more: garbage in a last tile spreads."""
    tokens, head_dim = q.shape[2:]
    if pages is not None:
        k, v = (x[pages].swapaxes(1, 2).reshape(*q.shape[:1], 1, -1, head_dim) for x in (k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x, group, axis=1).astype(jnp.float32) for x in (k, v))
    key = jnp.arange(k.shape[2])[None, None, None]
    row = jnp.arange(tokens)[None, None, :, None]
    ends = row + 1 if lengths is None else lengths[:, None, None, None]
    logits = jnp.einsum("bhtd,bhsd->bhts", q.astype(jnp.float32), k, precision="highest") * scale
    seen = key < ends
    if window is not None:
        assert lengths is None
        seen &= key >= ends - window
    logits = jnp.where(seen, logits, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=-1)  # -inf for no keys, which makes `weights` NaN
    weights = jnp.exp(logits - lse[..., None])
    loaded = -(-ends.max(axis=2, keepdims=True) // TILE) * TILE
    v = jnp.where((key < loaded).swapaxes(2, 3), v, 0.0)
    out = jnp.einsum("bhts,bhsd->bhtd", weights, v, precision="highest")
    return out.astype(q.dtype), lse


@functools.cache
def compiled(implementation, scale, window):
    return jax.jit(
        lambda q, k, v, lengths, slots, sinks: implementation(
            q, k, v, lengths, slots, None, scale, window, sinks
        )
    )


with_stand_in = functools.partial(cudnn.verify_attention, attend=stand_in)

# Query batch, cache batch, T, S, K, G, D, dtype, window, sinks.
CASES = [
    (2, 2, 128, 300, 2, 2, 16, "bfloat16", None, False),
    (1, 3, 130, 384, 2, 3, 24, "float16", None, True),
    (2, 4, 128, 512, 1, 2, 16, "bfloat16", None, False),
    (2, 2, 128, 300, 2, 1, 16, "float16", 100, True),
    (1, 2, 128, 512, 1, 2, 16, "float16", 1, False),
    (2, 2, 128, 140, 1, 2, 16, "float16", 128, False),  # a window and T exceed S
    (2, 2, 128, 256, 1, 2, 16, "float16", 999, False),
]


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=6)
@given(data=st.data())
def test_agrees_with_reference_whatever_lies_past_the_valid_rows(case, data):
    batch, cache_batch, tokens, rows, kv_heads, group, head_dim, dtype, window, with_sinks = case
    shape = (batch, cache_batch, tokens, rows, kv_heads, group, head_dim)
    arrays = random_attention(data.draw(SEEDS), *shape, 1.0)
    length = st.sampled_from([0, 1, 5, min(128, rows - tokens), rows - tokens])
    lengths = np.array(data.draw(st.lists(length, min_size=batch, max_size=batch)), np.int32)
    slots = None
    if cache_batch != batch:
        slots = np.array(data.draw(st.permutations(range(cache_batch)))[:batch], np.int32)
    sinks = np.linspace(-2, 3, kv_heads * group, dtype=np.float32) if with_sinks else None
    q, k, v = (x.astype(dtype) for x in map(jnp.asarray, arrays))
    expected = compiled(reference.verify_attention, 0.3, window)(q, k, v, lengths, slots, sinks)

    for i, length in enumerate(lengths):
        slot = i if slots is None else slots[i]
        for x in arrays[1:]:
            x[slot, :, length + tokens :] = data.draw(POISONS)
    k, v = (x.astype(dtype) for x in map(jnp.asarray, arrays[1:]))
    arguments = (q, k, v, lengths, slots, None, 0.3, window, sinks)
    assert cudnn.refuses(*arguments) is None
    out, lse, scores = compiled(with_stand_in, 0.3, window)(q, k, v, lengths, slots, sinks)

    assert (out.dtype, lse.dtype, scores) == (q.dtype, jnp.float32, None)
    assert_close(out, expected[0], TOLERANCE[dtype], "out")
    assert_close(lse, expected[1], 5e-6, "lse")


REFUSALS = {
    "scores": {"scores": "last"},
    "q": {"tokens": 127},
    "q must be": {"dtype": "float32"},
    "q must have a head_dim": {"head_dim": 136},
    "window": {"window": 129},
    "k": {"rows": 500, "slots": 1},
    "slots": {"slots": 3},
}


@pytest.mark.parametrize("change", REFUSALS.values(), ids=REFUSALS.keys())
def test_refuses_and_names_the_argument(change, request, monkeypatch):
    monkeypatch.setattr(dispatch, "lacks", lambda kernels: None)
    size = {"tokens": 128, "dtype": "bfloat16", "head_dim": 16, "rows": 512} | change
    slots = change.get("slots")
    batch = slots or 4
    q = jnp.zeros((batch, size["tokens"], 2, size["head_dim"]), size["dtype"])
    k = jnp.zeros((4, 2, size["rows"], size["head_dim"]), size["dtype"])
    name = request.node.callspec.id.split()[0]
    with pytest.raises(ValueError, match=f"^`{name}` .* with kernels='cudnn'[.]$"):
        verify_attention(
            q,
            k,
            k,
            jnp.zeros(batch, jnp.int32),
            slots=None if slots is None else jnp.arange(slots),
            scores=change.get("scores"),
            window=change.get("window"),
            kernels="cudnn",
        )


@pytest.fixture
def cudnn_present(monkeypatch):
    """As on an H100, for tracing and lowering."""
    fused = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91400)
    monkeypatch.setattr(fused, "check_is_flash_attention", lambda *_, **__: None)


QWEN3_8B = {"heads": 32, "kv_heads": 8, "head_dim": 128, "rows": 32768}


@pytest.mark.parametrize("slots", [None, 1, 4])
def test_neither_copies_nor_transposes_the_cache(slots, cudnn_present):
    batch, tokens, size = slots or 4, 512, QWEN3_8B
    q = jax.ShapeDtypeStruct((batch, tokens, size["heads"], size["head_dim"]), "bfloat16")
    cache = jax.ShapeDtypeStruct((4, size["kv_heads"], size["rows"], size["head_dim"]), "bfloat16")
    index = jax.ShapeDtypeStruct((batch,), "int32")

    def run(q, k, v, lengths, named):
        named = None if slots is None else named
        return cudnn.verify_attention(q, k, v, lengths, named, None, 0.1)

    lowered = jax.jit(run).trace(q, cache, cache, index, index).lower(lowering_platforms=("cuda",))
    made = {}  # the largest result of each operation, in elements
    for line in lowered.as_text().splitlines():
        found = re.match(r"\s*%\S+ = (?:stablehlo[.])?\"?([\w.]+)\"?", line)
        if found:
            results = line.rsplit("->", 1)[-1] if "->" in line else line.rsplit(":", 1)[-1]
            for dims in re.findall(r"tensor<((?:\d+x)+)", results):
                elements = int(np.prod([int(n) for n in dims.split("x")[:-1]]))
                made[found[1]] = max(elements, made.get(found[1], 0))

    calls = lowered.as_text().count("@__cudnn$fmhaSoftmax(")
    assert calls == 2
    row = size["kv_heads"] * size["rows"] * size["head_dim"]  # of one sequence
    free = {"reshape", "optimization_barrier", "call"}  # the same memory by another name
    assert {name for name, elements in made.items() if elements >= row} <= free, made


def test_auto_says_so_only_when_it_falls_back(monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "lacks", lambda kernels: None)
    dispatch.say_once.cache_clear()
    implementations = {
        "cudnn": Implementation(lambda x: "cudnn", lambda x: "`x` is small," if x < 9 else None),
        "triton": Implementation(lambda x: "triton", lambda x: "`x` is odd" if x % 2 else None),
        "xla": Implementation(lambda x: "xla"),
    }
    with caplog.at_level(logging.WARNING):
        assert [choose("auto", implementations, x)(x) for x in (9, 2)] == ["cudnn", "triton"]
        assert not caplog.messages
        assert [choose("auto", implementations, x)(x) for x in (3, 5)] == ["xla", "xla"]
    assert caplog.messages == [
        "kernels='xla' is used. Passed over: 'cudnn', for `x` is small; 'triton', for `x` is odd."
    ]


@pytest.mark.parametrize(
    ("capability", "found", "missing"),
    [(None, True, "capability 8.0"), (7.5, True, "capability 8.0"), (8.0, False, "cuDNN")],
)
def test_says_what_is_missing(capability, found, missing, monkeypatch):
    assert dispatch.has_cudnn() in (True, False)
    monkeypatch.setattr(dispatch, "compute_capability", lambda: capability)
    monkeypatch.setattr(dispatch, "has_cudnn", lambda: found)
    array, lengths = jnp.zeros((1, 8, 1, 16)), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match=f"^`kernels` is 'cudnn', which needs .*{missing}.*[.]$"):
        verify_attention(
            array, array.swapaxes(1, 2), array.swapaxes(1, 2), lengths, kernels="cudnn"
        )


def test_hands_the_window_to_cudnn(cudnn_present):
    q = jax.ShapeDtypeStruct((2, 512, 64, 64), "bfloat16")
    cache = jax.ShapeDtypeStruct((2, 8, 4096, 64), "bfloat16")
    run = jax.jit(lambda *arrays: cudnn.verify_attention(*arrays, None, None, 0.1, window=128))
    lengths = jax.ShapeDtypeStruct((2,), "int32")
    text = run.trace(q, cache, cache, lengths).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = re.findall("custom_call @__cudnn.*", text)
    assert "sliding_window_length\\22: 128" in call
    assert "mask_type\\22: \\22CAUSAL" in call
