import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import random_weights
from vegas_jax import Transformer
from vegas_jax.sharding import param_shapes

SMALL = random_weights.SMALL


@pytest.fixture(scope="module")
def work():
    model = Transformer(SMALL)
    return random_weights.RandomWorkload(model, random_weights.random_params(model), 2, 512)


def test_the_command(monkeypatch, capsys):
    monkeypatch.setattr(random_weights.timing, "copy_bandwidth", lambda size: {"guessed": 1e10})
    assert random_weights.main(["--plain", "--threads=2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("There is no GPU here")
    _, _, row = [line.split("|") for line in text.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in row[1:4]] == ["small", "2 x 512", "plain"]
    assert 2 <= float(row[4]) <= 4  # two tokens, two experts each
    assert float(row[6]) > 0


@pytest.mark.parametrize(
    "flags", [["--models", "gpt-2"], ["--shapes", "8x100"], ["--shapes", "x8"], ["--threads=0"]]
)
def test_a_bad_flag_is_one_sentence(flags, capsys):
    with pytest.raises(SystemExit) as exit_:
        random_weights.main(flags)
    assert exit_.value.code == 2
    assert re.fullmatch(r"[A-Z].*[.]\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("name", "billions", "gigabytes"),
    # Parameters by the model cards; gpt-oss's experts have 4.25 bits a weight, the others 16.
    [("qwen3-8b", 8.2, 16.4), ("qwen3-30b-a3b", 30.5, 61.1), ("gpt-oss-20b", 20.9, 13.8)],
)
def test_shapes_are_those_of_the_model_cards(name, billions, gigabytes):
    model = Transformer(random_weights.MODELS[name], jnp.dtype("bfloat16"))
    leaves = jax.tree_util.tree_leaves_with_path(param_shapes(model))
    count = {"blocks": 2, "scales": 0}
    weights = sum(
        leaf.size * count.get(str(path[-1].key).split("_")[-1], 1) for path, leaf in leaves
    )
    assert weights / 1e9 == pytest.approx(billions, abs=0.05)
    stored = sum(leaf.size * leaf.dtype.itemsize for _, leaf in leaves)
    assert stored / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_counts_experts_and_bytes(work):
    experts = SMALL.moe.num_experts
    program = random_weights.compile_count(work, 300)
    assert random_weights.touched_experts(work, program, 300) == experts
    # All weights but the embedding; 40 keys and values of float32, the window is longer.
    row = 2 * SMALL.num_kv_heads * SMALL.head_dim * 4
    stored = sum(x.nbytes for x in jax.tree.leaves(work.params)) - work.params["embed"].nbytes
    found = random_weights.bytes_read(work, 40, float(experts))
    assert found == stored + 2 * 2 * row * 40
    # One layer of the two sees 128 of 200; of the experts' weights half are read.
    mlps = [work.params[f"layers_{i}"]["mlp"] for i in range(2)]
    routers = sum(mlp["router"].nbytes for mlp in mlps)
    of_experts = sum(x.nbytes for x in jax.tree.leaves(mlps)) - routers
    found = random_weights.bytes_read(work, 200, experts / 2)
    assert found == stored - of_experts / 2 + 2 * row * (128 + 200)


def test_random_weights_are_finite_and_alike_in_all_layers(work):
    dense = dataclasses.replace(SMALL, moe=None)
    params = random_weights.random_params(Transformer(dense))
    assert 0.019 < float(params["layers_1"]["mlp"]["down"].std()) < 0.021
    assert (params["layers_0"]["attn"]["o"] != params["layers_1"]["attn"]["o"]).any()
    assert (params["final_norm"]["scale"] == 1).all()
    state = work.begin_large(random_weights.PLAIN)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.cache.layers))
    np.testing.assert_array_equal(state.cache.lengths, work.length)
