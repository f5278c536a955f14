import dataclasses
import re
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import texts
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import (
    acceptance,
    compiling,
    correctness,
    limits,
    parts,
    peers,
    prefill,
    speed,
    workload,
)
from benchmarks.widen import widen
from tests import tiny
from vegas_jax import SpecConfig, Transformer

WIDE = dataclasses.replace(
    tiny.CONFIG,
    vocab_size=120,
    hidden_size=48,
    intermediate_size=64,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    tie_word_embeddings=False,
)


class Letters:
    """A tokenizer whose ids the tiny model knows."""

    def encode(self, text):
        return [ord(c) % tiny.CONFIG.vocab_size for c in text[:2000]]


@pytest.fixture(scope="module")
def models():
    params = tiny.params()
    return workload.Models(tiny.MODEL, params, *widen(tiny.MODEL, params, WIDE), Letters())


def test_the_command(models, monkeypatch, capsys):
    method = SpecConfig(num_speculative_tokens=2, sparse_min_tokens=32)
    monkeypatch.setattr(speed, "METHODS", {"vegas": method})
    monkeypatch.setattr(speed, "TRAINED", 256)
    shares = {"vegas": {0.3: [0.9, 0.8, 0.7]}}
    monkeypatch.setattr(speed, "acceptances", lambda work, options: shares)
    monkeypatch.setattr(command.timing, "copy_bandwidth", lambda size: {"guessed": 1e10})
    monkeypatch.setattr(workload.Models, "load", lambda config, dtype: models)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    arguments = ["--shapes", "2x340", "--max_drafts=3", "--max_new_tokens=64", "--threads=2"]
    arguments += ["--ratios", "0.3"]
    monkeypatch.setattr(command, "check_float32", lambda *_, **sizes: print(sizes) or True)
    arguments += ["--only", "correctness", "prefill", "decode"]
    assert command.main(arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith("There is no GPU here")
    assert text.index("{'rows': 1024") < text.index("prefill of") < text.index("plain step")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    rows = {row[1]: row for row in rows if len(row) > 1}
    assert {"plain step", "vegas: draft step", "vegas: verify 7", "vegas: select"} < set(rows)
    assert float(rows["plain step"][2]) > 0
    assert rows["vegas"][2] == "30.0%"
    assert 1 <= int(rows["vegas"][3]) <= 3
    assert 1 <= float(rows["vegas"][4]) <= 4
    assert all(re.fullmatch(r"\d+\.\d\dx", cell) for cell in rows["vegas"][7:])
    assert rows["vegas; acceptance at 0K"][-1].endswith("x")


@pytest.mark.parametrize(
    "flags",
    [
        ["--only", "speed"],
        ["--shapes", "8"],
        ["--shapes", "0x512"],
        ["--shapes", "1x300"],
        ["--shapes", "2x100000000"],
        ["--max_new_tokens=8"],
        ["--max_new_tokens=40000"],
        ["--max_drafts=65"],
        ["--threads=0"],
        ["--ratios", "0.1", "1.5"],
    ],
)
def test_a_bad_flag_is_one_sentence(flags, capsys):
    with pytest.raises(SystemExit) as exit_:
        command.main(flags)
    assert exit_.value.code == 2
    assert re.fullmatch(r"[A-Z].*[.]\n", capsys.readouterr().err)


def test_small_and_wide_write_the_same(models):
    work = workload.Workload(models, 2, 300, 12, 0.0)
    expected = correctness.small_tokens(work)
    assert (expected == correctness.wide_tokens(work, correctness.PLAIN)).all()


def test_notices_other_tokens(models, monkeypatch, capsys):
    answers = {"plain": np.zeros((2, 4), int), "vegas": np.array([[0, 0, 0, 0], [0, 0, 3, 0]])}
    monkeypatch.setattr(correctness, "small_tokens", lambda work: answers["plain"])
    monkeypatch.setattr(correctness, "wide_tokens", lambda work, spec: answers[spec.method])
    assert not correctness.check_float32(models, 300, 4)
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("the small one's: yes")
    assert second.endswith("plain ones: NO, text 1 from token 2 on")


def test_says_where_tokens_part(models, monkeypatch, capsys):
    plain = correctness.wide_tokens(workload.Workload(models, 2, 300, 12, 0.0), correctness.PLAIN)
    other = plain.copy()
    other[1, 5:] += 1
    answers = iter([plain, other])
    monkeypatch.setattr(correctness, "wide_tokens", lambda work, config: next(answers))
    correctness.show_divergences(models, models, 300, 12)
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("text 0: vegas' 12 tokens are plain ones")
    assert "first other token after 5 of 12" in second


def test_acceptances_of_all_methods_and_ratios(models, monkeypatch):
    monkeypatch.setattr(speed, "by_position", lambda work, spec: [spec.sparse_ratio] * 2)
    options = speed.Options(max_drafts=2, ratios=(0.1, 0.2), threads=2, cudnn=False)
    found = speed.acceptances(workload.Workload(models, 2, 300, 40), options)
    assert found == {name: {0.1: [0.1, 0.1], 0.2: [0.2, 0.2]} for name in speed.METHODS}


def test_the_best_number_of_drafts():
    shares = [0.9, 0.8, 0.4, 0.1]
    assert acceptance.tokens_a_round(shares, 2) == pytest.approx(2.7)
    assert acceptance.best_gamma(shares, parts.Parts(0.1, 1.0, 0.0)) == 3
    assert acceptance.best_gamma(shares, parts.Parts(1.0, 1.0, 0.0)) == 1


def test_tuning_weighs_keys_against_acceptance(models):
    work = workload.Workload(models, 2, 4000, 40)
    roofline = parts.Roofline.of(models.wide, models.wide_params, 1e10)
    found = parts.Parts(draft=3e-4, verify=1e-3, select=0.0)
    method = SpecConfig(sparse_min_tokens=1)
    few, many = [0.6, 0.3, 0.1], [0.9, 0.8, 0.7]
    default = SpecConfig().sparse_ratio
    assert speed.parts_with(work, method, found, roofline) == found
    more = speed.parts_with(work, speed.tuned(method, 6, 2 * default), found, roofline)
    keys = 2 * default * work.length
    assert more.draft - found.draft == pytest.approx(keys * roofline.row / 1e10, rel=0.05)
    best = speed.tune(work, method, {default: few, 2 * default: many}, found, roofline)
    assert (best.sparse_ratio, best.num_drafts) == (2 * default, 3)
    best = speed.tune(work, method, {default: few, 2 * default: few}, found, roofline)
    assert best.sparse_ratio == default


def test_acceptance_is_that_of_the_rounds(models):
    work = workload.Workload(models, 2, 300, 30)
    streaming = SpecConfig(method="streaming", num_speculative_tokens=3, sparse_min_tokens=20)
    shares = acceptance.by_position(work, streaming)
    assert 0 < shares[0] < 1
    assert shares == sorted(shares, reverse=True)


def test_rooflines_of_qwen3_8b():
    model = Transformer(workload.QWEN3_8B, jnp.dtype("bfloat16"))
    shape = jax.ShapeDtypeStruct((4096, 151936), jnp.bfloat16)
    roofline = parts.Roofline.of(model, {"embed": shape, "head": shape}, 1e12)
    assert roofline.weights == 2 * 4096 * 151936
    assert roofline.row == 147456  # 2 x 36 x 8 x 128 x 2 bytes
    assert roofline.seconds(1000) == (roofline.weights + 147456000) / 1e12


def test_operations_of_reading(models):
    layers = {n: x for n, x in models.wide_params.items() if n.startswith("layers_")}
    weights = sum(x.size for x in jax.tree.leaves(layers))
    expected = 2 * weights * 3 + 4 * 3 * 8 * 16 * (1 + 2 + 3)
    assert prefill.operations(models, 3) == expected


def test_loss_by_position(models, monkeypatch):
    monkeypatch.setattr(prefill, "BUCKET", 100)
    losses = prefill.loss_by_position(models, 300)
    assert len(losses) == 3
    assert all(np.isfinite(loss) and loss > 0 for loss in losses)


def test_the_largest_context_fits_and_no_larger_one(models):
    roofline = parts.Roofline.of(models.wide, models.wide_params, 1e12)
    weights = sum(x.nbytes for x in jax.tree.leaves(models.wide_params))
    limit = weights + limits.HEADROOM + 2 * 1500 * roofline.row
    assert limits.largest_context(models, 2, roofline, limit) == 1024
    assert limits.try_context(models, 2, 1024).startswith("fits: 8 tokens written")


def test_compiles_from_shapes_alone(monkeypatch, capsys):
    monkeypatch.setattr(compiling, "SMALL", dataclasses.replace(workload.SMALL, vocab_size=9000))
    seen = []
    monkeypatch.setattr(compiling, "compile_decode", lambda work, config: seen.append(work))
    compiling.main(["2x512"])
    assert float(capsys.readouterr().out) >= 0
    assert seen[0].models.wide_params["head"].shape == (384, 9000)
    assert (seen[0].batch, seen[0].rows) == (2, 512)


def test_asks_twice_with_one_cache(monkeypatch):
    folders = []

    def run(command, env, **_):
        folders.append(env["JAX_COMPILATION_CACHE_DIR"])
        return subprocess.CompletedProcess(command, 0, stdout=f"{len(folders)}.5\n")

    monkeypatch.setattr(compiling.subprocess, "run", run)
    assert compiling.compile_seconds(2, 512) == (1.5, 2.5)
    assert folders[0] == folders[1]


def test_says_why_a_peer_did_not_run(monkeypatch):
    monkeypatch.setattr(peers.shutil, "which", lambda name: None)
    assert "needs an NVIDIA GPU" in peers.transformers_steps([(1, 512)])["not run"]


def test_windows_end_at_different_places():
    found = texts.windows(Letters(), 500, 3)
    assert [len(window) for window in found] == [500] * 3
    assert len({tuple(window) for window in found}) == 3
    with pytest.raises(ValueError, match="length is 100000000"):
        texts.windows(Letters(), 100_000_000, 2)
