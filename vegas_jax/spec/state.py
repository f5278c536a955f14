"""What a decoding loop carries: the cache, each sequence's request, and the selected keys."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Int8

from vegas_jax import drafters
from vegas_jax.cache import KVCache, init_cache
from vegas_jax.config import SamplingParams, SpecConfig
from vegas_jax.drafters import Selection
from vegas_jax.errors import check
from vegas_jax.model.config import ModelConfig
from vegas_jax.model.forward import PREFILL_CHUNK
from vegas_jax.model.transformer import Transformer
from vegas_jax.sampling import Processors, SamplingValues
from vegas_jax.sharding import constrain_state

MAX_STOP_TOKENS = 16


class Requests(struct.PyTreeNode):
    """The requests in progress; every leaf has a leading axis of sequences, B.

    M is the capacity for emitted tokens. Penalty arrays and logprobs are None unless a processor
    needs them.

    Attributes:
      pending: t0, the last emitted token, whose K/V are not in the cache yet.
      tokens: emitted tokens, `pending` included; the first `emitted` are valid.
      kinds: where each came from, see `vegas_jax.completion.Kind`.
      logprobs: log-probability of each under the model's unprocessed distribution.
      emitted, limit: how many tokens there are, and may be.
      done: no more tokens wanted (or no request in this slot).
      rounds: rounds made, which keys the noise of rejection sampling.
      drafts, accepted: the last round's drafts and how many of them were kept.
      bad_position: where logits stopped being finite, or -1.
      stop_tokens: ids that end the sequence, padded with -1.
      in_prompt, counts: which tokens the prompt has, and how often the output has each.
    """

    pending: Int[Array, "B"]
    tokens: Int[Array, "B M"]
    kinds: Int8[Array, "B M"]
    logprobs: Float[Array, "B M"] | None
    emitted: Int[Array, "B"]
    limit: Int[Array, "B"]
    done: Bool[Array, "B"]
    rounds: Int[Array, "B"]
    drafts: Int[Array, "B gamma"]
    accepted: Int[Array, "B"]
    bad_position: Int[Array, "B"]
    stop_tokens: Int[Array, "B stops"]
    sampling: SamplingValues
    in_prompt: Bool[Array, "B V"] | None
    counts: Int[Array, "B V"] | None

    def rows(self, slots: Int[Array, "b"]) -> "Requests":
        """The requests of some slots."""
        return jax.tree.map(lambda leaf: leaf[slots], self)

    def put(self, slots: Int[Array, "b"], rows: "Requests") -> "Requests":
        """Replaces the requests of some slots."""
        return jax.tree.map(lambda leaf, new: leaf.at[slots].set(new), self, rows)


class DecodeState(struct.PyTreeNode):
    """Everything a round reads and writes.

    Between rounds `cache.lengths` rows of each sequence are verified, and `requests.pending` is the
    token that comes next.
    """

    cache: KVCache
    requests: Requests
    selection: Selection | None


def cache_rows(max_len: int, spec: SpecConfig) -> int:
    """Cache rows for prompts and completions of together `max_len` tokens.

    gamma + 1 more than that, so that the last round has room and results do not depend on gamma;
    rounded up to whole prefill chunks.
    """
    needed = max_len + spec.num_speculative_tokens + 1
    return -(-needed // PREFILL_CHUNK) * PREFILL_CHUNK


def new_requests(
    config: ModelConfig,
    spec: SpecConfig,
    sampling: SamplingParams,
    *,
    batch: int,
    max_len: int,
    limits: Int[Array, "b"],
    seeds: tuple[int, ...] | None = None,
    prompts: Int[Array, "b P"] | None = None,
    prompt_lengths: Int[Array, "b"] | None = None,
) -> Requests:
    """Requests that have not begun.

    `limits` are the tokens that each may emit. `prompts` are needed with penalties only.
    """
    processors = Processors.of(sampling)
    stops = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stops |= set(config.eos_token_ids)
    check(
        len(stops) <= MAX_STOP_TOKENS,
        "stop_token_ids",
        sampling.stop_token_ids,
        f"at most {MAX_STOP_TOKENS} ids, the checkpoint's own included",
    )
    padded = sorted(stops) + [-1] * (MAX_STOP_TOKENS - len(stops))
    in_prompt = counts = None
    if processors.penalties:
        assert prompts is not None
        assert prompt_lengths is not None
        in_prompt = _tokens_present(prompts, prompt_lengths, config.vocab_size)
        counts = jnp.zeros((batch, config.vocab_size), jnp.int32)

    def zeros() -> Array:
        # A new array each time: a buffer must not be donated twice.
        return jnp.zeros(batch, jnp.int32)

    return Requests(
        pending=zeros(),
        tokens=jnp.zeros((batch, max_len), jnp.int32),
        kinds=jnp.zeros((batch, max_len), jnp.int8),
        logprobs=jnp.zeros((batch, max_len), jnp.float32) if processors.logprobs else None,
        emitted=zeros(),
        limit=limits,
        done=limits <= 0,
        rounds=zeros(),
        drafts=jnp.zeros((batch, spec.num_drafts), jnp.int32),
        accepted=zeros(),
        bad_position=jnp.full(batch, -1, jnp.int32),
        stop_tokens=jnp.tile(jnp.asarray([padded], jnp.int32), (batch, 1)),
        sampling=SamplingValues.of(sampling, batch, seeds),
        in_prompt=in_prompt,
        counts=counts,
    )


def init_state(
    model: Transformer,
    spec: SpecConfig,
    sampling: SamplingParams,
    *,
    batch: int,
    max_len: int,
) -> DecodeState:
    """A state of `batch` empty slots, all done, for sequences of up to `max_len` tokens."""
    config = model.config
    rows = cache_rows(max_len, spec)
    nothing: dict[str, Any] = {"prompts": None, "prompt_lengths": None}
    if Processors.of(sampling).penalties:
        nothing = {
            "prompts": jnp.zeros((batch, 1), jnp.int32),
            "prompt_lengths": jnp.zeros(batch, jnp.int32),
        }
    requests = new_requests(
        config,
        spec,
        sampling,
        batch=batch,
        max_len=max_len,
        limits=jnp.zeros(batch, jnp.int32),
        seeds=(0,) * batch,
        **nothing,
    )
    state = DecodeState(
        cache=init_cache(config, batch, rows, model.dtype, model.mesh),
        requests=requests,
        selection=drafters.get(spec).init(spec, config, batch, rows),
    )
    return constrain_state(state, model.mesh)


def _tokens_present(
    prompts: Int[Array, "b P"], lengths: Int[Array, "b"], vocab_size: int
) -> Bool[Array, "b V"]:
    batch, width = prompts.shape
    inside = jnp.arange(width, dtype=jnp.int32)[None, :] < lengths[:, None]
    tokens = jnp.where(inside, prompts, vocab_size)  # out of range: dropped
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    return jnp.zeros((batch, vocab_size), bool).at[rows, tokens].set(True, mode="drop")
