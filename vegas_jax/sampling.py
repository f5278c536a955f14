"""From logits to tokens: one set of functions for plain decoding, drafting and verifying alike.

Speculative sampling is lossless only if the draft's distribution q is exactly the one that its
token was drawn from, so every processor runs through `process_logits`, for draft and target.

*Which* processors run is static (`Processors`); their values are traced (`SamplingValues`).
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from vegas_jax.config import SamplingParams
from vegas_jax.errors import check

# What a random draw is for. Each purpose has a stream of noise of its own.
COUPLED, DRAFT, ACCEPT, RESIDUAL = range(4)


@dataclasses.dataclass(frozen=True)
class Processors:
    """Which logits processors run, and whether log-probabilities are kept: the static part."""

    greedy: bool
    top_k: bool
    top_p: bool
    min_p: bool
    penalties: bool
    logprobs: bool

    @classmethod
    def of(cls, params: SamplingParams) -> "Processors":
        """The processors that these parameters need; truncation changes nothing under greedy."""
        random = not params.greedy
        return cls(
            greedy=params.greedy,
            top_k=random and params.top_k > 0,
            top_p=random and params.top_p < 1.0,
            min_p=random and params.min_p > 0.0,
            penalties=params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0,
            logprobs=params.logprobs,
        )


class SamplingValues(struct.PyTreeNode):
    """Per-request sampling values, every leaf [B, ...]."""

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]
    repetition_penalty: Float[Array, "B"]
    presence_penalty: Float[Array, "B"]
    frequency_penalty: Float[Array, "B"]
    seed: UInt32[Array, "B 2"]

    @classmethod
    def of(
        cls, params: SamplingParams, batch: int, seeds: tuple[int, ...] | None = None
    ) -> "SamplingValues":
        """The same values for every row; `seeds` (default: params.seed) one per row."""
        if seeds is None:
            seeds = params.seed if isinstance(params.seed, tuple) else (params.seed,) * batch
        check(len(seeds) == batch, "seed", seeds, f"one value, or one for each of {batch} rows")
        halves = [[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds]

        def fill(value: float, dtype: type = np.float32) -> Array:
            return jnp.full(batch, value, dtype)

        return cls(
            temperature=fill(params.temperature),
            top_k=fill(min(params.top_k, 2**31 - 1), np.int32),
            top_p=fill(params.top_p),
            min_p=fill(params.min_p),
            repetition_penalty=fill(params.repetition_penalty),
            presence_penalty=fill(params.presence_penalty),
            frequency_penalty=fill(params.frequency_penalty),
            seed=jnp.asarray(np.array(halves, np.uint32).reshape(batch, 2)),
        )


def noise_key(
    seed: UInt32[Array, "2"], purpose: int, index: Int[Array, ""], step: Int[Array, ""] | int = 0
) -> Key[Array, ""]:
    """The key of one draw: of this request's seed and nothing else about the batch.

    `index` is the position of the token being drawn (COUPLED) or the request's round number (the
    others): after a rejection the next draft's q depends on discarded drafts, so under rejection
    sampling a position that is drawn again needs fresh noise.
    """
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    key = jax.random.fold_in(key, purpose)
    return jax.random.fold_in(jax.random.fold_in(key, index), step)


def process_logits(
    logits: Float[Array, "B T V"],
    values: SamplingValues,
    processors: Processors,
    in_prompt: Bool[Array, "B V"] | None = None,
    counts: Int[Array, "B T V"] | None = None,
) -> Float[Array, "B T V"]:
    """The unnormalised log-probabilities that a token is drawn from; excluded tokens are -inf.

    `in_prompt` and `counts` (how often the output so far has each token, for each row) are needed
    with penalties only. Order: penalties, temperature, top-k, top-p, min-p, as in transformers.
    """

    def rows(value: Array) -> Array:
        return value[:, None, None]

    if processors.penalties:
        assert in_prompt is not None
        assert counts is not None
        seen = in_prompt[:, None, :] | (counts > 0)
        penalty = rows(values.repetition_penalty)
        repeated = jnp.where(logits > 0, logits / penalty, logits * penalty)
        logits = jnp.where(seen, repeated, logits)
        logits -= rows(values.presence_penalty) * (counts > 0).astype(jnp.float32)
        logits -= rows(values.frequency_penalty) * counts.astype(jnp.float32)
    if processors.greedy:
        return logits
    # Shifting by the maximum first keeps tiny temperatures finite: the best token stays at 0.
    logits = (logits - logits.max(-1, keepdims=True)) / rows(values.temperature)
    if processors.top_k:
        logits = jnp.where(_top_k_mask(logits, rows(values.top_k)), logits, -jnp.inf)
    if processors.top_p:
        logits = jnp.where(_top_p_mask(logits, rows(values.top_p)), logits, -jnp.inf)
    if processors.min_p:
        # The likeliest token stands at 0, so p >= min_p * max(p) reads logit >= log(min_p).
        logits = jnp.where(logits >= jnp.log(rows(values.min_p)), logits, -jnp.inf)
    return logits


def draw(weights: Float[Array, "B V"], keys: Key[Array, "B"]) -> Int[Array, "B"]:
    """One token per row with probability proportional to its weight.

    Inverts the cumulative distribution: one random number a row, where the Gumbel-max trick takes
    one for every entry of the vocabulary.
    """
    cumulative = jnp.cumsum(weights, -1)
    # Uniforms are multiples of 2^-23 below 1, so the product stays below the last sum.
    uniform = jax.vmap(lambda key: jax.random.uniform(key))(keys)
    target = uniform[:, None] * cumulative[:, -1:]
    return jnp.argmax(cumulative > target, -1).astype(jnp.int32)


def draw_coupled(
    logits: Float[Array, "B T V"],
    values: SamplingValues,
    processors: Processors,
    positions: Int[Array, "B T"],
) -> Int[Array, "B T"]:
    """Draws each row's token with noise that depends on its seed and position only.

    Whoever draws at a position, draft or target, alone or in a batch, draws with the same Gumbel
    noise; where their distributions agree they draw the same token (common random numbers).
    """
    if processors.greedy:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    keys = jax.vmap(
        lambda seed, row: jax.vmap(lambda position: noise_key(seed, COUPLED, position))(row)
    )(values.seed, positions)
    batch, rows, vocabulary = logits.shape
    gumbel = jax.vmap(lambda key: jax.random.gumbel(key, (vocabulary,)))(keys.reshape(-1))
    return jnp.argmax(logits + gumbel.reshape(batch, rows, vocabulary), -1).astype(jnp.int32)


def _top_k_mask(logits: Array, k: Array) -> Array:
    """Entries no smaller than the k-th largest; equals at the border are all kept."""
    ordered = _ordered_bits(logits)

    def enough(threshold: Array) -> Array:
        at_least = (ordered >= threshold).astype(jnp.int32)
        return at_least.sum(-1, keepdims=True) >= k

    return ordered >= _largest_threshold(enough, (*logits.shape[:-1], 1))


def _top_p_mask(logits: Array, p: Array) -> Array:
    """The smallest set of likeliest entries whose probability reaches p (arXiv 1904.09751)."""
    probabilities = jax.nn.softmax(logits, -1)
    p = jnp.maximum(p, jnp.finfo(jnp.float32).tiny)  # 0 would be reached by keeping nothing
    ordered = _ordered_bits(probabilities)

    def enough(threshold: Array) -> Array:
        kept = jnp.where(ordered >= threshold, probabilities, 0.0)
        return kept.sum(-1, keepdims=True) >= p

    return ordered >= _largest_threshold(enough, (*logits.shape[:-1], 1))


def _ordered_bits(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """Maps float32 to uint32 so that order is kept."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _largest_threshold(
    enough: Callable[[Array], Array], shape: tuple[int, ...]
) -> UInt32[Array, "..."]:
    """The largest threshold for which `enough` holds, bit by bit from the top.

    `enough` must be monotone. 32 passes over the vocabulary, against the log(V) passes and the data
    movement of a sort.
    """

    def refine(i: Array, threshold: Array) -> Array:
        candidate = threshold | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(enough(candidate), candidate, threshold)

    return jax.lax.fori_loop(0, 32, refine, jnp.zeros(shape, jnp.uint32))
