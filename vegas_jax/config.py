"""Frozen settings: how a model speculates, how it samples.

Both are hashable, so that they can be static arguments of a jitted function.
"""

import dataclasses
import math
import numbers
from typing import Any, Literal, get_args

import numpy as np

from vegas_jax.errors import check

Method = Literal["vegas", "streaming", "dense", "plain"]
ScoreMode = Literal["weight", "logit"]
ScoreRows = Literal["first+last", "all", "last", "last_accepted"]
Acceptance = Literal["rejection", "coupled"]
BLOCK_SIZES = (1, 8, 16, 32, 64)


@dataclasses.dataclass(frozen=True)
class SpecConfig:
    """How to draft, and which keys a draft step may attend to.

    Attributes:
      method: `vegas` drafts with the keys that the last verification scored highest, `streaming`
        with attention sinks and a recent window (MagicDec-Stream), `dense` with all keys, `plain`
        does not draft.
      num_speculative_tokens: gamma, drafts per round.
      sparse_ratio: share of the context a draft step attends to.
      sparse_min_tokens: ... but at least so many keys.
      sparse_block_size: keys are chosen in aligned blocks of so many positions, ranked by their
        mean score; 1 chooses single positions, as published.
      score_pool: (back, ahead): position i is ranked by the mean score of positions
        i-ahead .. i+back. The next tokens look just ahead of where the verified ones looked. (0, 0)
        as published. Where keys are chosen in blocks, verification scores them by `score_block`
        positions, and the window is rounded up to whole ones.
      score_mode: `weight` ranks by attention probability (the authors' release), `logit` by the
        pre-softmax logit (the paper's formula).
      score_rows: which verified tokens' queries count. `first+last` is Collect-2-Query.
      per_kv_head: choose one set per KV head instead of one per layer.
      acceptance: `rejection` is speculative sampling (most tokens a round); `coupled` draws draft
        and target with the same noise, so that the text is token for token that of plain sampling.
        Greedy decoding is both.
    """

    method: Method = "vegas"
    num_speculative_tokens: int = 6
    sparse_ratio: float = 0.07
    sparse_min_tokens: int = 256
    sparse_block_size: int = 16
    score_pool: tuple[int, int] = (0, 7)
    score_mode: ScoreMode = "weight"
    score_rows: ScoreRows = "first+last"
    per_kv_head: bool = False
    acceptance: Acceptance = "rejection"

    def __post_init__(self) -> None:
        _check_choice("method", self.method, Method)
        _integers(self, "num_speculative_tokens", "sparse_min_tokens", "sparse_block_size")
        gamma = self.num_speculative_tokens
        allowed = "an integer from 1 to 64"
        check(_is_int(gamma) and 1 <= gamma <= 64, "num_speculative_tokens", gamma, allowed)
        _check_range("sparse_ratio", self.sparse_ratio, above=0.0, most=1.0)
        least = self.sparse_min_tokens
        allowed = "an integer of at least 1"
        check(_is_int(least) and least >= 1, "sparse_min_tokens", least, allowed)
        block = self.sparse_block_size
        allowed = f"one of {', '.join(map(str, BLOCK_SIZES))}"
        check(_is_int(block) and block in BLOCK_SIZES, "sparse_block_size", block, allowed)
        if isinstance(self.score_pool, list):
            object.__setattr__(self, "score_pool", tuple(self.score_pool))
        pool = self.score_pool
        check(
            isinstance(pool, tuple)
            and len(pool) == 2
            and all(_is_int(n) and 0 <= n <= 1024 for n in pool),
            "score_pool",
            pool,
            "two integers from 0 to 1024: positions (back, ahead)",
        )
        check(isinstance(self.per_kv_head, bool), "per_kv_head", self.per_kv_head, "True or False")
        _check_choice("score_mode", self.score_mode, ScoreMode)
        _check_choice("score_rows", self.score_rows, ScoreRows)
        _check_choice("acceptance", self.acceptance, Acceptance)

    @property
    def score_block(self) -> int:
        """Neighbouring positions that share a score: 8 where blocks are chosen, 1 otherwise.

        A kernel writes the scores of eight keys at hardly any cost, and those of single keys at
        some (`pallas_kernels.verify.mosaic_sm90`).
        """
        return 8 if self.sparse_block_size % 8 == 0 else 1

    @classmethod
    def published(cls, **changes: Any) -> "SpecConfig":
        """The authors' released setting: single positions, no smoothing, mode `weight`.

        `published(score_mode="logit")` is the paper's formula.
        """
        return dataclasses.replace(cls(sparse_block_size=1, score_pool=(0, 0)), **changes)

    @property
    def num_drafts(self) -> int:
        """Draft steps that a round really makes: gamma, or none for `plain`."""
        return 0 if self.method == "plain" else self.num_speculative_tokens

    def max_selected(self, max_len: int) -> int:
        """Static bound on the keys that a draft step selects at a context of up to `max_len`."""
        return min(max(math.ceil(self.sparse_ratio * max_len), self.sparse_min_tokens), max_len)


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn and when to stop.

    Processors apply in this order, to draft and target alike: penalties, temperature, top-k, top-p,
    min-p. Changing values never recompiles; switching a processor on or off does.

    Attributes:
      max_new_tokens: None continues until the model stops or max_len is reached.
      temperature: 0 (anything below 1e-5) is greedy.
      top_k: 0 is off.
      top_p: 1 is off.
      min_p: drops tokens less likely than min_p times the likeliest; 0 is off.
      repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or
        the output (CTRL, arXiv 1909.05858); 1 is off.
      presence_penalty: subtracted once from the logit of a token that the output has.
      frequency_penalty: subtracted for each time that the output has the token.
      seed: an int for every prompt alike, or one per prompt.
      stop: strings that end the text; the text ends before them.
      stop_token_ids: more tokens that end the sequence, besides the checkpoint's own.
      ignore_eos: continue past the checkpoint's end-of-sequence tokens.
      logprobs: report each token's log-probability under the model's own, unprocessed distribution.
    """

    max_new_tokens: int | None = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | tuple[int, ...] = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "seed"):
            value = getattr(self, name)
            if isinstance(value, list | np.ndarray):
                object.__setattr__(self, name, tuple(value))
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        _integers(self, "max_new_tokens", "top_k", "seed", "stop_token_ids")
        new, top_k = self.max_new_tokens, self.top_k
        allowed = "None or an integer of at least 0"
        check(new is None or (_is_int(new) and new >= 0), "max_new_tokens", new, allowed)
        check(_is_int(top_k) and top_k >= 0, "top_k", top_k, "an integer of at least 0")
        _check_range("temperature", self.temperature, least=0.0)
        _check_range("top_p", self.top_p, above=0.0, most=1.0)
        _check_range("min_p", self.min_p, least=0.0, below=1.0)
        # Bounds far beyond use, within which float32 logits stay finite.
        _check_range("repetition_penalty", self.repetition_penalty, least=1e-6, most=1e6)
        _check_range("presence_penalty", self.presence_penalty, least=-1e6, most=1e6)
        _check_range("frequency_penalty", self.frequency_penalty, least=-1e6, most=1e6)
        seeds = self.seed if isinstance(self.seed, tuple) else (self.seed,)
        allowed = "an integer from 0 to 2**64 - 1, or one such integer per prompt"
        check(all(_is_int(s) and 0 <= s < 2**64 for s in seeds), "seed", self.seed, allowed)
        for name, members, wanted in (
            ("stop", lambda s: isinstance(s, str) and s, "non-empty strings"),
            ("stop_token_ids", lambda t: _is_int(t) and 0 <= t < 2**31, "token ids"),
        ):
            value = getattr(self, name)
            check(isinstance(value, tuple) and all(map(members, value)), name, value, wanted)
        for name in ("ignore_eos", "logprobs"):
            check(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without noise."""
        return self.temperature < 1e-5


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_choice(name: str, value: Any, literal: Any) -> None:
    choices = get_args(literal)
    check(value in choices, name, value, f"one of {', '.join(choices)}")


def _integers(config: Any, *names: str) -> None:
    """Turns numpy's integers into Python's; leaves all else to be checked."""

    def convert(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(convert, value))
        return int(value) if isinstance(value, np.integer) else value

    for name in names:
        object.__setattr__(config, name, convert(getattr(config, name)))


def _check_range(
    name: str,
    value: Any,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
) -> None:
    """Checks for a finite number within bounds, `above` and `below` exclusive."""
    bounds = (("at least", least), ("above", above), ("below", below), ("at most", most))
    limits = [f"{word} {bound:g}" for word, bound in bounds if math.isfinite(bound)]
    allowed = " ".join(["a finite number", " and ".join(limits)]).strip()
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    inside = number and math.isfinite(value) and least <= value <= most and above < value < below
    check(inside, name, value, allowed)
