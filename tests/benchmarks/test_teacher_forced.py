import numpy as np
import pytest

from benchmarks.teacher_forced import expected_acceptance, summary
from tests import tiny
from vegas_jax import SamplingParams, SpecConfig
from vegas_jax.compiled import prefill_slot
from vegas_jax.spec import init_state

(TEXT,) = tiny.prompts([300])
FEW = {"num_speculative_tokens": 3, "sparse_min_tokens": 16, "sparse_ratio": 0.05}


def acceptance(config):
    sizes = {"batch": 1, "max_len": len(TEXT)}
    cache = init_state(tiny.MODEL, config, SamplingParams(), **sizes).cache
    cache = prefill_slot(tiny.MODEL, tiny.params(), cache, TEXT[:250], 0)
    return expected_acceptance(tiny.MODEL, tiny.params(), cache, TEXT, config)


def test_all_keys_mean_that_all_is_accepted():
    everything = SpecConfig(num_speculative_tokens=3, sparse_ratio=1.0, sparse_block_size=1)
    for config in (SpecConfig(method="dense", num_speculative_tokens=3), everything):
        found = acceptance(config)
        assert found.shape == (11, 3)  # twelve rounds of four fit, the first chooses the keys
        np.testing.assert_allclose(found, 1, atol=1e-5)


@pytest.mark.parametrize("method", ["streaming", "vegas"])
def test_few_keys_mean_that_some_is_not(method):
    found = acceptance(SpecConfig(method=method, **FEW))
    assert (found > 0).all()
    assert found.mean() < 0.99


def test_the_summary_is_of_rounds():
    mean, error, tokens = summary(np.array([[1.0, 0.5], [0.5, 0.5]]))
    assert mean == 0.625
    assert error == pytest.approx(0.125)
    assert tokens == pytest.approx(1 + (1.5 + 0.75) / 2)
