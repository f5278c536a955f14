"""How many drafts stand, measured with the small model; how many are worth making."""

import jax
import numpy as np

from benchmarks.gpu.parts import Parts
from benchmarks.gpu.workload import Workload
from vegas_jax import SpecConfig, Stats


def by_position(work: Workload, config: SpecConfig) -> list[float]:
    """Share of the rounds in which draft 1, 2, ... gamma was accepted, over the whole batch."""
    requests = work.decode_small(config).requests
    kinds, emitted = jax.device_get((requests.kinds, requests.emitted))
    gamma = config.num_drafts
    stats = [
        Stats.from_kinds(row[:count].tolist(), gamma, prefill_s=0.0, decode_s=1.0)
        for row, count in zip(kinds, emitted, strict=True)
    ]
    rounds = np.array([s.rounds for s in stats], np.float64)
    shares = np.array([s.acceptance_by_position for s in stats])
    return [float(x) for x in (shares * rounds[:, None]).sum(axis=0) / rounds.sum()]


def tokens_a_round(shares: list[float], gamma: int) -> float:
    """Of rounds of gamma drafts, by the shares that more drafts had."""
    return 1 + sum(shares[:gamma])


def best_gamma(shares: list[float], parts: Parts) -> int:
    """How many drafts a round give the most tokens a second by the cost model."""
    counts = range(1, len(shares) + 1)
    return max(counts, key=lambda gamma: tokens_a_round(shares, gamma) / parts.round(gamma))
