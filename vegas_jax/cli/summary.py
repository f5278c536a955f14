"""What a run amounts to: totals over its completions, and how two runs compare."""

import dataclasses
from collections.abc import Sequence

from vegas_jax.completion import Completion, Kind


@dataclasses.dataclass(frozen=True)
class Totals:
    """Totals over the completions of one run.

    `tokens_per_second` and `mean_acceptance_length` count as `Stats` does: the first token of each
    prompt, which the prefill gives, is left out. Times are seconds.
    """

    prompts: int
    tokens: int
    prefill_s: float
    decode_s: float
    tokens_per_second: float
    mean_acceptance_length: float
    drafted: int
    accepted: int
    acceptance_by_position: tuple[float, ...]


def total(completions: Sequence[Completion], wall_s: float) -> Totals:
    """Adds up a run that took `wall_s` seconds, prefill and decoding together.

    Prompts of one batch decode at the same time, so that their times must not be added: the decode
    time is then what the prefill leaves of `wall_s`, within the bounds that the single times give.
    """
    prefill_s = sum(c.stats.prefill_s for c in completions)
    decode = [c.stats.decode_s for c in completions]
    decode_s = min(max(wall_s - prefill_s, max(decode, default=0.0)), sum(decode))
    in_rounds = sum(kind != Kind.FIRST for c in completions for kind in c.kinds)
    rounds = sum(c.stats.rounds for c in completions)
    return Totals(
        prompts=len(completions),
        tokens=sum(c.stats.emitted for c in completions),
        prefill_s=prefill_s,
        decode_s=decode_s,
        tokens_per_second=in_rounds / decode_s if decode_s > 0 else 0.0,
        mean_acceptance_length=in_rounds / rounds if rounds else 0.0,
        drafted=sum(c.stats.drafted for c in completions),
        accepted=sum(c.stats.accepted for c in completions),
        acceptance_by_position=_acceptance_by_position(completions),
    )


def first_differences(
    completions: Sequence[Completion], others: Sequence[Completion]
) -> list[tuple[int, int]]:
    """(index of the completion, position of the first token that differs), where any does."""
    found = []
    for index, (one, other) in enumerate(zip(completions, others, strict=True)):
        if tuple(one.token_ids) != tuple(other.token_ids):
            pairs = zip(one.token_ids, other.token_ids, strict=False)
            shorter = min(len(one.token_ids), len(other.token_ids))
            position = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
            found.append((index, position))
    return found


def _acceptance_by_position(completions: Sequence[Completion]) -> tuple[float, ...]:
    """Means of the completions' shares, weighted by how many rounds tested each position."""
    size = max((len(c.stats.acceptance_by_position) for c in completions), default=0)
    accepted = [0.0] * size
    tested = [0] * size
    for completion in completions:
        for i, share in enumerate(completion.stats.acceptance_by_position):
            rounds = _rounds_testing(completion, i)
            tested[i] += rounds
            accepted[i] += share * rounds
    return tuple(a / t if t else 0.0 for a, t in zip(accepted, tested, strict=True))


def _rounds_testing(completion: Completion, position: int) -> int:
    """Rounds that tested draft `position`: all whole ones, and a last one cut after it."""
    whole = sum(kind in (Kind.CORRECTED, Kind.BONUS) for kind in completion.kinds)
    cut = 0
    for kind in reversed(completion.kinds):
        if kind != Kind.ACCEPTED:
            break
        cut += 1
    return whole + (position < cut)
