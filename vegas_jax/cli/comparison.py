"""`--compare_plain`: the same prompts without drafting, set against the run before."""

import dataclasses
from collections.abc import Mapping, Sequence

from vegas_jax.cli.running import Engine, Request, run_batched
from vegas_jax.cli.summary import Totals, first_differences
from vegas_jax.cli.terminal import Stderr
from vegas_jax.completion import Completion
from vegas_jax.config import SamplingParams, SpecConfig

_SHOWN = 5  # prompts whose first difference is told


def with_plain(
    engine: Engine,
    spec: SpecConfig,
    sampling: SamplingParams,
    requests: Sequence[Request],
    finished: Mapping[int, Completion],
    totals: Totals,
    stderr: Stderr,
) -> tuple[Totals, list[str]]:
    """Decodes all requests plainly.

    The plain run is always one compiled loop, also when the run before was streamed and went to the
    host after every round: the speed-up is then, if anything, told too low.

    Args:
      finished: the completions of the run before, by index; `totals` are its totals.

    Returns:
      The plain run's totals, and lines that say how the two compare.
    """
    others: dict[int, Completion] = {}
    plain = run_batched(
        engine,
        dataclasses.replace(spec, method="plain"),
        sampling,
        requests,
        others.__setitem__,
        None,
        stderr,
    )
    indices = range(len(requests))
    differences = first_differences([finished[i] for i in indices], [others[i] for i in indices])
    lines = [_speed(spec, totals, plain)]
    lines += _equality(spec, sampling, requests, differences)
    return plain, lines


def _speed(spec: SpecConfig, totals: Totals, plain: Totals) -> str:
    if not totals.tokens_per_second or not plain.tokens_per_second:
        return "speed-up: there are too few tokens to tell"
    ratio = totals.tokens_per_second / plain.tokens_per_second
    return f"speed-up: {spec.method} decodes {ratio:.2f}x the tokens per second of plain"


def _equality(
    spec: SpecConfig,
    sampling: SamplingParams,
    requests: Sequence[Request],
    differences: Sequence[tuple[int, int]],
) -> list[str]:
    equal = len(requests) - len(differences)
    lines = [f"tokens: equal to plain's for {equal} of {len(requests)} prompts"]
    if not differences:
        return lines
    if spec.acceptance == "rejection" and not sampling.greedy:
        lines.append(
            "rejection sampling keeps the distribution, not the tokens: equality is not expected"
            " (--acceptance=coupled keeps the tokens)"
        )
        return lines
    shown = [f"{requests[i].id} at token {position}" for i, position in differences[:_SHOWN]]
    more = f" and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
    lines.append(
        f"first difference: {', '.join(shown)}{more} (in float32 there should be none; in 16 bits"
        " near-ties may fall either way)"
    )
    return lines
