"""Prompts in, completions out: the front door for people."""

import operator
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels import sparse_attention, verify_attention
from vegas_jax import drafters
from vegas_jax.compiled import begin_jit, decode_jit, finish_jit, init_jit, on_host, prefill_slot
from vegas_jax.completion import Completion, Delta
from vegas_jax.config import SamplingParams, SpecConfig
from vegas_jax.errors import InputError, NonFiniteLogitsError, check
from vegas_jax.model.forward import Params
from vegas_jax.model.transformer import Transformer
from vegas_jax.progress import Job, Progress
from vegas_jax.sampling import Processors
from vegas_jax.sharding import MODEL, is_placed, whole_batch
from vegas_jax.spec.state import DecodeState, Requests, init_state, new_requests
from vegas_jax.text.channels import Channels
from vegas_jax.text.tokenizer import Tokenizer

ROUNDS_PER_CALL = 16  # between two looks at stop strings, the progress bar and Ctrl-C

Prompt = str | Sequence[int]


class Generator:
    """Continues prompts with a model, drafting as `spec` says.

    Args:
      model, params, tokenizer: as `vegas_jax.load` gives them. Without a tokenizer prompts are
        token ids and completions have no text.
      spec: how to draft; the default is what gives most tokens per second.
      max_len: room for prompt and completion together, in tokens; by default 4096, or what the
        model can do. Memory grows with it, the time of a round does not.
      batch_size: sequences decoded at once, at most. Slots are refilled as sequences finish. On a
        mesh there is a multiple of its data axis of them, at least one for each of its devices.
      channels: for replies that have channels, as gpt-oss's do: `final` gives the text of the final
        channel, `all` that of each under a heading line; None takes all tokens as text.
    """

    def __init__(
        self,
        model: Transformer,
        params: Params,
        tokenizer: Tokenizer | None = None,
        *,
        spec: SpecConfig | None = None,
        max_len: int | None = None,
        batch_size: int = 8,
        channels: Channels | None = None,
    ) -> None:
        limit = model.config.max_position_embeddings
        max_len = min(4096, limit) if max_len is None else max_len
        for name, value in (("max_len", max_len), ("batch_size", batch_size)):
            valid = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            check(valid, name, value, "an integer of at least 1")
        if max_len > limit:
            raise InputError(f"max_len is {max_len}, but the model knows positions up to {limit}")
        check(channels in (None, "final", "all"), "channels", channels, "final, all or None")
        spec = SpecConfig() if spec is None else spec
        check(isinstance(spec, SpecConfig), "spec", spec, "a SpecConfig")
        _check_kernels(model, spec)
        if not is_placed(model, params):
            raise InputError(
                "params are not on the model's mesh: put them there with vegas_jax.sharding."
                "shard_params(model, params), or load them with vegas_jax.load(..., mesh=mesh)"
            )
        self.model = model
        self.params = params
        self.tokenizer = tokenizer
        self.spec = spec
        self.max_len = max_len
        self.batch_size = batch_size
        self.channels = channels

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | None = None
    ) -> list[Completion]:
        """Continues every prompt; completions come in the order of the prompts.

        Raises:
          InputError: before anything runs, for a prompt that is empty, does not fit or is not text
            or token ids of this model.
          NonFiniteLogitsError: the model's logits stopped being finite.
        """
        return [
            c for _, c in sorted(self.as_completed(prompts, sampling), key=lambda pair: pair[0])
        ]

    def as_completed(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Iterator[tuple[int, Completion]]:
        """Like `generate`, but yields (index of the prompt, completion) as they finish.

        `progress` is called with the number of tokens emitted since its last call.
        """
        sampling = SamplingParams() if sampling is None else sampling
        jobs = self._jobs(prompts, sampling)
        return self._run(jobs, sampling, progress or (lambda _: None))

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[Delta]:
        """Continues one prompt, yielding what each round adds.

        The same round as everywhere, called once a delta. The last delta carries the completion;
        text that could still become part of a stop string is held back until that is decided.
        """
        sampling = SamplingParams() if sampling is None else sampling
        (job,) = self._jobs([prompt], sampling)
        return self._stream(job, sampling)

    def warmup(
        self, sampling: SamplingParams | None = None, num_prompts: int | None = None
    ) -> None:
        """Compiles all that `num_prompts` prompts (default: batch_size) with such sampling need.

        The first run otherwise begins with it: some ten seconds on a CPU, more for large models.
        """
        sampling = SamplingParams() if sampling is None else sampling
        self._check_sampling(sampling)
        state = self._empty_state(self._num_slots(num_prompts or self.batch_size), sampling)
        job = Job(0, (0,) * min(2, self.max_len), limit=0, seed=0)
        state = self._admit(state, job, 0, sampling)
        state = self._advance(state, sampling, max_rounds=0)
        jax.block_until_ready(finish_jit(state, np.int32(0), self.model.mesh))

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; InputError where there is none or an id is not the model's."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InputError(
                    "prompt is a string, but this checkpoint has no tokenizer.json; give token ids"
                )
            ids = self.tokenizer.encode(prompt)
        else:
            ids = _token_ids(prompt)
        if not ids:
            raise InputError("prompt is empty, but must have at least one token")
        vocab_size = self.model.config.vocab_size
        bad = next((token for token in ids if not 0 <= token < vocab_size), None)
        if bad is not None:
            raise InputError(
                f"prompt has the token id {bad}, but ids go from 0 to {vocab_size - 1}"
            )
        return ids

    def _jobs(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Job]:
        """Checks every request before any runs."""
        if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):
            raise InputError(
                f"prompts is a {type(prompts).__name__}, but must be a list of prompts"
            )
        self._check_sampling(sampling)
        prompts = list(prompts)
        seeds = sampling.seed
        if isinstance(seeds, tuple) and len(seeds) != len(prompts):
            raise InputError(f"seed has {len(seeds)} values, but there are {len(prompts)} prompts")
        jobs = []
        for i, prompt in enumerate(prompts):
            try:
                ids = self.encode(prompt)
            except InputError as error:
                raise InputError(f"prompt {i}: {error}") from None
            room = self.max_len - len(ids)
            wanted = sampling.max_new_tokens
            if (1 if wanted is None else wanted) > room:
                need = "room for one more" if wanted is None else f"max_new_tokens {wanted}"
                raise InputError(
                    f"prompt {i} has {len(ids)} tokens; with {need} that is over max_len "
                    f"{self.max_len}"
                )
            jobs.append(
                Job(
                    index=i,
                    prompt=tuple(ids),
                    limit=room if wanted is None else wanted,
                    seed=seeds[i] if isinstance(seeds, tuple) else seeds,
                )
            )
        return jobs

    def _check_sampling(self, sampling: SamplingParams) -> None:
        if not isinstance(sampling, SamplingParams):
            raise InputError(f"sampling is {sampling!r}, but must be SamplingParams")
        vocab_size = self.model.config.vocab_size
        beyond = [t for t in sampling.stop_token_ids if t >= vocab_size]
        if beyond:
            raise InputError(
                f"stop_token_ids has {beyond[0]}, but ids go from 0 to {vocab_size - 1}"
            )
        if sampling.stop and self.tokenizer is None:
            raise InputError("stop needs a tokenizer, but this checkpoint has no tokenizer.json")

    def _run(
        self, jobs: list[Job], sampling: SamplingParams, report: Callable[[int], None]
    ) -> Iterator[tuple[int, Completion]]:
        waiting = [job for job in reversed(jobs) if job.limit]
        for job in jobs:
            if not job.limit:
                yield job.index, self._progress(job, sampling).completion()
        if not waiting:
            return
        num_slots = self._num_slots(len(waiting))
        state = self._empty_state(num_slots, sampling)
        running: dict[int, Progress] = {}
        while waiting or running:
            for slot in range(num_slots):
                if slot not in running and waiting:
                    job = waiting.pop()
                    began = time.perf_counter()
                    state = self._admit(state, job, slot, sampling)
                    jax.block_until_ready(state.requests.emitted)
                    running[slot] = self._progress(job, sampling, time.perf_counter() - began)
            began = time.perf_counter()
            state = self._advance(state, sampling, ROUNDS_PER_CALL, stop_on_any_done=bool(waiting))
            jax.block_until_ready(state.requests.emitted)
            seconds = time.perf_counter() - began
            host = on_host(state.requests, self.model.mesh)
            self._check_finite(host, running)
            for slot, progress in list(running.items()):
                report(progress.update(host, slot, seconds))
                if progress.finished:
                    if not host.done[slot]:
                        state = finish_jit(state, np.int32(slot), self.model.mesh)
                    del running[slot]
                    yield progress.job.index, progress.completion()

    def _stream(self, job: Job, sampling: SamplingParams) -> Iterator[Delta]:
        if not job.limit:
            completion = self._progress(job, sampling).completion()
            yield Delta("", (), (), (), 0, completion)
            return
        state = self._empty_state(self._num_slots(1), sampling)
        began = time.perf_counter()
        state = self._admit(state, job, 0, sampling)
        jax.block_until_ready(state.requests.emitted)
        progress = self._progress(job, sampling, time.perf_counter() - began)
        seconds, first = 0.0, True
        while not progress.finished:
            if not first:
                began = time.perf_counter()
                state = self._advance(state, sampling, max_rounds=1)
                jax.block_until_ready(state.requests.emitted)
                seconds = time.perf_counter() - began
            host = on_host(state.requests, self.model.mesh)
            self._check_finite(host, {0: progress})
            before = len(progress.token_ids)
            progress.update(host, 0, seconds)
            yield Delta(
                text="".join(text for text, _ in progress.shown),
                token_ids=tuple(progress.token_ids[before:]),
                segments=tuple(progress.shown),
                drafted=() if first else tuple(host.drafts[0].tolist()),
                accepted=0 if first else int(host.accepted[0]),
                completion=progress.completion() if progress.finished else None,
            )
            first = False

    def _num_slots(self, num_prompts: int) -> int:
        """The next power of two, so that different numbers of prompts share few compilations."""
        slots = min(self.batch_size, 1 << max(num_prompts - 1, 0).bit_length())
        return slots if self.model.mesh is None else whole_batch(slots, self.model.mesh)

    def _empty_state(self, num_slots: int, sampling: SamplingParams) -> DecodeState:
        init = init_state if self.model.mesh is None else init_jit
        return init(self.model, self.spec, sampling, batch=num_slots, max_len=self.max_len)

    def _admit(
        self, state: DecodeState, job: Job, slot: int, sampling: SamplingParams
    ) -> DecodeState:
        """Prefills a prompt into a slot, chunk by chunk, and draws its first token."""
        *before, last = job.prompt
        cache = prefill_slot(self.model, self.params, state.cache, before, slot)
        prompt = np.zeros((1, self.max_len), np.int32)
        prompt[0, : len(job.prompt)] = job.prompt
        requests = new_requests(
            self.model.config,
            self.spec,
            sampling,
            batch=1,
            max_len=self.max_len,
            limits=jnp.array([job.limit], jnp.int32),
            seeds=(job.seed,),
            prompts=jnp.asarray(prompt),
            prompt_lengths=jnp.array([len(job.prompt)], jnp.int32),
        )
        return begin_jit(
            model=self.model,
            params=self.params,
            state=state.replace(cache=cache),
            requests=requests,
            last_tokens=np.array([last], np.int32),
            lengths=np.array([len(before)], np.int32),
            slots=np.array([slot], np.int32),
            spec=self.spec,
            processors=Processors.of(sampling),
        )

    def _advance(
        self,
        state: DecodeState,
        sampling: SamplingParams,
        max_rounds: int,
        stop_on_any_done: bool = False,
    ) -> DecodeState:
        return decode_jit(
            model=self.model,
            params=self.params,
            state=state,
            spec=self.spec,
            processors=Processors.of(sampling),
            max_rounds=np.int32(max_rounds),
            stop_on_any_done=np.bool_(stop_on_any_done),
        )

    def _progress(self, job: Job, sampling: SamplingParams, prefill_s: float = 0.0) -> Progress:
        stops = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops |= set(self.model.config.eos_token_ids)
        return Progress(
            job,
            sampling,
            self.spec.num_drafts,
            self.tokenizer,
            frozenset(stops),
            prefill_s,
            self.channels,
        )

    def _check_finite(self, host: Requests, running: dict[int, Progress]) -> None:
        positions = host.bad_position
        for slot, progress in running.items():
            if positions[slot] >= 0:
                raise NonFiniteLogitsError(
                    f"the logits after position {positions[slot]} of prompt {progress.job.index} "
                    f"are not finite; dtype {self.model.dtype.name} may be too narrow for this "
                    "checkpoint"
                )


def _check_kernels(model: Transformer, spec: SpecConfig) -> None:
    """InputError if the kernels that the model names do not take its shapes."""
    if model.kernels == "auto":  # takes whatever is given
        return
    config, gamma, rows = model.config, spec.num_drafts, 64 * spec.num_drafts + 64
    array = jax.ShapeDtypeStruct

    def attend(q: Array, draft: Array, cache: Array, blocks: Array, number: Array) -> None:
        verify_attention(
            q,
            cache,
            cache,
            number,
            scores=drafters.get(spec).score_rows(spec),
            score_mode=spec.score_mode,
            score_block=spec.score_block,
            kernels=model.kernels,
        )
        sparse_attention(
            draft,
            cache,
            cache,
            blocks,
            number,
            number,
            block_size=spec.sparse_block_size,
            tail_start=number,
            max_tail=1,
            kernels=model.kernels,
        )

    shares = 1 if model.mesh is None else model.mesh.shape[MODEL]
    heads, head_dim = config.num_heads // shares, config.head_dim
    cache = array((1, config.num_kv_heads // shares, rows, head_dim), model.dtype)
    number, blocks = array((1,), jnp.int32), array((1, 1), jnp.int32)
    queries = [array((1, tokens, heads, head_dim), model.dtype) for tokens in (gamma + 1, 1)]
    try:
        jax.eval_shape(attend, *queries, cache, blocks, number)
    except ValueError as error:
        raise InputError(str(error).removesuffix(".")) from None


def _token_ids(prompt: Sequence[int]) -> list[int]:
    try:
        if isinstance(prompt, bytes | bytearray):
            raise TypeError
        return [operator.index(token) for token in np.asarray(prompt, object).tolist()]
    except TypeError:
        raise InputError(
            f"prompt is a {type(prompt).__name__} that is neither text nor a list of token ids; "
            "one prompt of token ids goes in a list of its own"
        ) from None
