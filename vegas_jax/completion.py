"""What a run gives back: completions, stream deltas, statistics of the tokens that were kept."""

import dataclasses
import enum
from collections.abc import Sequence


class Kind(enum.IntEnum):
    """Where an emitted token came from."""

    FIRST = 0  # drawn from the verification of the prompt's last token; belongs to no round
    ACCEPTED = 1  # drafted with sparse attention, confirmed by full attention
    CORRECTED = 2  # replaces the first draft that full attention refused
    BONUS = 3  # drawn after every draft was accepted; with `plain`, every token


@dataclasses.dataclass(frozen=True)
class Stats:
    """Statistics of one completion. They count only tokens that the completion kept.

    A draft counts as drafted when it was tested and its outcome kept: in a round that was cut short
    (end of sequence, stop string, max_new_tokens) only the drafts that were emitted count, so
    accepted <= drafted always, and emitted = 1 + accepted + corrected + bonus tokens.
    `mean_acceptance_length` is tokens per round, the prompt's own first token left out.
    `acceptance_by_position[i]` is the share of rounds that accepted draft i, of those that tested
    it or an earlier one.
    """

    rounds: int
    drafted: int
    accepted: int
    emitted: int
    mean_acceptance_length: float
    acceptance_by_position: tuple[float, ...]
    prefill_s: float
    decode_s: float
    tokens_per_second: float

    @classmethod
    def from_kinds(
        cls, kinds: Sequence[int], num_drafts: int, *, prefill_s: float, decode_s: float
    ) -> "Stats":
        """Derives everything from the kinds of the kept tokens.

        Each round ends with a corrected or a bonus token, unless it was cut.
        """
        lengths: list[int] = []  # accepted drafts of each round
        drafted_at = [0] * num_drafts
        accepted_at = [0] * num_drafts
        accepted = 0
        cut = False
        for kind in kinds:
            if kind == Kind.FIRST:
                continue
            cut = kind == Kind.ACCEPTED
            if cut:
                accepted += 1
            else:
                lengths.append(accepted)
                accepted = 0
        tested = [num_drafts] * len(lengths)
        if cut:
            lengths.append(accepted)
            tested.append(accepted)
        for n_accepted, n_tested in zip(lengths, tested, strict=True):
            for i in range(n_tested):
                drafted_at[i] += 1
                accepted_at[i] += i < n_accepted
        in_rounds = sum(kind != Kind.FIRST for kind in kinds)
        rounds = len(lengths)
        return cls(
            rounds=rounds,
            drafted=sum(drafted_at),
            accepted=sum(accepted_at),
            emitted=len(kinds),
            mean_acceptance_length=in_rounds / rounds if rounds else 0.0,
            acceptance_by_position=tuple(
                a / d if d else 0.0 for a, d in zip(accepted_at, drafted_at, strict=True)
            ),
            prefill_s=prefill_s,
            decode_s=decode_s,
            tokens_per_second=in_rounds / decode_s if decode_s > 0 else 0.0,
        )


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished continuation.

    `token_ids`, `kinds` and `logprobs` (None unless asked for) have the same length; `text` is what
    the tokens spell, without the end-of-sequence token and cut before a stop string.
    `finish_reason` is `stop`, `length` or, when no max_new_tokens was given, `cache`.
    """

    prompt_tokens: int
    text: str
    token_ids: tuple[int, ...]
    kinds: tuple[Kind, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: str
    stats: Stats


@dataclasses.dataclass(frozen=True)
class Delta:
    """What one round added to a streamed continuation.

    `segments` are (text, kind) pieces in order, for colouring; together they are `text`.
    `drafted` are all the drafts of the round, of which the first `accepted` were kept.
    `completion` is set on the last delta.
    """

    text: str
    token_ids: tuple[int, ...]
    segments: tuple[tuple[str, Kind], ...]
    drafted: tuple[int, ...]
    accepted: int
    completion: Completion | None = None
