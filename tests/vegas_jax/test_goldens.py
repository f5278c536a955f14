"""The model against transformers, for every architecture (tests/goldens/make_goldens.py)."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vegas_jax
from vegas_jax import Generator, SamplingParams, SpecConfig
from vegas_jax.checkpoint.hf_config import ARCHITECTURES

GOLDENS = Path(__file__).parents[1] / "goldens"
CHECKPOINTS = sorted(path.parent.name for path in GOLDENS.glob("*/golden.npz"))
METHODS = ("plain", "vegas")


def read_fields(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def padded(prompts: list[np.ndarray]) -> tuple[jax.Array, jax.Array]:
    lengths = [len(p) for p in prompts]
    tokens = np.zeros((len(prompts), max(lengths)), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return jnp.asarray(tokens), jnp.asarray(lengths, jnp.int32)


def golden_prompts(golden) -> dict[int, np.ndarray]:
    names = [name for name in golden if name.startswith("prompt_")]
    return {len(golden[name]): golden[name] for name in names}


@pytest.mark.parametrize("name", CHECKPOINTS)
class TestAgainstTransformers:
    """Logits within 1e-4 in float32, greedy tokens equal."""

    def test_logits(self, name):
        model, params, _ = vegas_jax.load(GOLDENS / name, dtype="float32")
        golden = np.load(GOLDENS / name / "golden.npz")
        prompts = golden_prompts(golden)
        tokens, lengths = padded(list(prompts.values()))
        logits = vegas_jax.logits(model, params, tokens, lengths)
        assert logits.dtype == jnp.float32
        for row, n in zip(logits, prompts, strict=True):
            expected = golden[f"logits_{n}"]
            np.testing.assert_allclose(row[golden[f"positions_{n}"]], expected, atol=1e-4)
            assert not row[n:].any()

    def test_greedy_tokens(self, name):
        model, params, _ = vegas_jax.load(GOLDENS / name, dtype="float32")
        golden = np.load(GOLDENS / name / "golden.npz")
        prompts = golden_prompts(golden)
        for method in METHODS:
            spec = SpecConfig(method=method, sparse_ratio=0.05, sparse_min_tokens=8)
            generator = Generator(model, params, spec=spec, max_len=512)
            completions = generator.generate(
                list(prompts.values()), SamplingParams(max_new_tokens=32, ignore_eos=True)
            )
            for n, completion in zip(prompts, completions, strict=True):
                assert completion.token_ids == tuple(golden[f"greedy_{n}"].tolist())
        accepted, drafted = (
            sum(getattr(c.stats, what) for c in completions) for what in ("accepted", "drafted")
        )
        assert accepted < drafted


def test_there_are_goldens_of_every_architecture():
    found = {read_fields(GOLDENS / name)["architectures"][0] for name in CHECKPOINTS}
    assert found == set(ARCHITECTURES)
