"""The host's side of one request: its tokens as text, where it ends, and what it took."""

import dataclasses
from typing import Any

from vegas_jax.completion import Completion, Kind, Stats
from vegas_jax.config import SamplingParams
from vegas_jax.text import Channels, StopChecker, Tokenizer
from vegas_jax.text.channels import make_detokenizer


@dataclasses.dataclass(frozen=True)
class Job:
    """A request that was checked: prompt tokens, how many tokens it may emit, its seed."""

    index: int
    prompt: tuple[int, ...]
    limit: int
    seed: int


class Progress:
    """Follows one request while it runs.

    Attributes:
      token_ids, kinds, logprobs: the tokens kept so far; all the rest is derived from them.
      shown: the (text, kind) pieces that the last `update` made safe to show.
      finished: no more tokens will be kept.
    """

    def __init__(
        self,
        job: Job,
        sampling: SamplingParams,
        num_drafts: int,
        tokenizer: Tokenizer | None,
        stop_tokens: frozenset[int],
        prefill_s: float,
        channels: Channels | None = None,
    ) -> None:
        self.job = job
        self.token_ids: list[int] = []
        self.kinds: list[Kind] = []
        self.logprobs: list[float] | None = [] if sampling.logprobs else None
        self.shown: list[tuple[str, Kind]] = []
        self.finished = job.limit == 0
        self._text: list[str] = []
        self._sampling = sampling
        self._num_drafts = num_drafts
        self._detokenizer = None if tokenizer is None else make_detokenizer(tokenizer, channels)
        self._stop_tokens = stop_tokens
        self._stop_strings = StopChecker(sampling.stop)
        self._stopped = False
        self._prefill_s = prefill_s
        self._decode_s = 0.0

    def update(self, requests: Any, slot: int, seconds: float) -> int:
        """Takes in what the device emitted since the last time; returns how many tokens that was.

        Args:
          requests: `vegas_jax.spec.state.Requests`, on the host.
          slot: which of them this request is.
          seconds: how long the device worked since the last time.
        """
        self.shown = []
        self._decode_s += seconds
        begin, end = len(self.token_ids), int(requests.emitted[slot])
        for i in range(begin, end):
            self._take(int(requests.tokens[slot, i]), Kind(int(requests.kinds[slot, i])))
            if self.logprobs is not None:
                self.logprobs.append(float(requests.logprobs[slot, i]))
            if self.finished:
                break
        return end - begin

    def completion(self) -> Completion:
        """What the kept tokens amount to."""
        sampling = self._sampling
        ran_out = "length" if sampling.max_new_tokens is not None else "cache"
        return Completion(
            prompt_tokens=len(self.job.prompt),
            text="".join(self._text),
            token_ids=tuple(self.token_ids),
            kinds=tuple(self.kinds),
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            finish_reason="stop" if self._stopped else ran_out,
            stats=Stats.from_kinds(
                self.kinds, self._num_drafts, prefill_s=self._prefill_s, decode_s=self._decode_s
            ),
        )

    def _take(self, token: int, kind: Kind) -> None:
        self.token_ids.append(token)
        self.kinds.append(kind)
        self._stopped = token in self._stop_tokens
        if self._detokenizer is not None:
            if not self._stopped:  # a stop token is no part of the text
                self._show(self._detokenizer.add(token), kind)
                self._show_heading(self._detokenizer.heading, kind)
            if self._stopped or len(self.token_ids) == self.job.limit:
                if not self._stop_strings.stopped:
                    self._show(self._detokenizer.flush(), kind)
                self._append(self._stop_strings.flush(), kind)
        self._stopped |= self._stop_strings.stopped
        self.finished = self._stopped or len(self.token_ids) == self.job.limit

    def _show(self, piece: str, kind: Kind) -> None:
        self._append(self._stop_strings.add(piece), kind)

    def _show_heading(self, heading: str, kind: Kind) -> None:
        """Shows what is not the model's: no stop string is looked for in it, or across it."""
        if heading and not self._stop_strings.stopped:
            self._append(self._stop_strings.flush(), kind)
            self._append(heading, kind)

    def _append(self, text: str, kind: Kind) -> None:
        if text:
            self._text.append(text)
            self.shown.append((text, kind))
