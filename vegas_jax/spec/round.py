"""One round: draft, verify, accept, select (Vegas, arXiv 2602.07223, section 3).

Notation of the paper: gamma drafts d1..d_gamma a round, L verified rows, the pending token t0 at
position L, a drafts accepted. Verification runs [t0, d1..d_gamma]; its row i judges d_(i+1).
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from vegas_jax import drafters
from vegas_jax.cache import KVCache
from vegas_jax.completion import Kind
from vegas_jax.config import SpecConfig
from vegas_jax.drafters import Selection
from vegas_jax.model.forward import Params, forward, unembed
from vegas_jax.model.transformer import Transformer
from vegas_jax.sampling import DRAFT, Processors, draw, draw_coupled, noise_key, process_logits
from vegas_jax.sharded_ops import verify_attention
from vegas_jax.sharding import constrain_state
from vegas_jax.spec.acceptance import accept_equal, accept_rejection
from vegas_jax.spec.state import DecodeState, Requests


def draft(
    model: Transformer,
    params: Params,
    state: DecodeState,
    spec: SpecConfig,
    processors: Processors,
) -> tuple[Int[Array, "B gamma"], Float[Array, "B gamma V"] | None, KVCache]:
    """gamma single-token forwards with sparse attention, from the pending token on.

    Returns the drafts, the distributions that they were drawn from (None where acceptance does not
    need them), and the cache, where the drafts' K/V stand beyond `lengths` until verification
    overwrites them.
    """
    requests, lengths = state.requests, state.cache.lengths
    if not spec.num_drafts:
        return requests.drafts, None, state.cache
    drafter = drafters.get(spec)
    by_rejection = uses_rejection(spec, processors)
    full = tuple(state.cache.layers[i] for i in model.config.full_layers)
    prepared = drafter.prepare(
        spec, state.selection, state.cache.replace(layers=full), model.kernels, model.mesh
    )

    def step(
        carry: tuple[KVCache, Array, Array | None], i: Array
    ) -> tuple[tuple[KVCache, Array, Array | None], tuple[Array, Array | None]]:
        cache, token, counts = carry
        attend = drafter.attend(spec, prepared, lengths, i, model.kernels, model.mesh)
        hidden, cache, _ = forward(model, params, cache, token[:, None], lengths + i, attend)
        logits = unembed(model, params, hidden)
        row_counts = None if counts is None else counts[:, None]
        logits = process_logits(
            logits, requests.sampling, processors, requests.in_prompt, row_counts
        )
        if by_rejection:
            keys = jax.vmap(lambda seed, r: noise_key(seed, DRAFT, r, i))(
                requests.sampling.seed, requests.rounds
            )
            q = jax.nn.softmax(logits[:, 0], -1)
            token = draw(q, keys)
        else:
            q = None
            token = draw_coupled(logits, requests.sampling, processors, (lengths + i + 1)[:, None])[
                :, 0
            ]
        if counts is not None:
            rows = jnp.arange(token.shape[0], dtype=jnp.int32)
            counts = counts.at[rows, token].add(1)
        return (cache, token, counts), (token, q)

    start = (state.cache, requests.pending, requests.counts)
    steps = jnp.arange(spec.num_drafts, dtype=jnp.int32)
    (cache, _, _), (drafts, q) = jax.lax.scan(step, start, steps)
    return drafts.swapaxes(0, 1), None if q is None else q.swapaxes(0, 1), cache


def verify(
    model: Transformer,
    params: Params,
    cache: KVCache,
    tokens: Int[Array, "b T"],
    spec: SpecConfig,
    slots: Int[Array, "b"] | None = None,
) -> tuple[Float[Array, "b T V"], KVCache, tuple[Array | None, ...]]:
    """One forward with full attention over T tokens after each sequence's verified rows.

    Returns the logits of all T rows, the cache with their K/V written (`lengths` unchanged), and
    per layer the key scores that the drafter of `spec` asks for.
    """
    starts = cache.lengths if slots is None else cache.lengths[slots]
    rows = drafters.get(spec).score_rows(spec)

    def attend(
        layer: int, q: Array, k: Array, v: Array, sinks: Array | None
    ) -> tuple[Array, Array | None]:
        out, _, scores = verify_attention(
            q,
            k,
            v,
            starts,
            mesh=model.mesh,
            slots=slots,
            scores=rows,
            score_mode=spec.score_mode,
            per_kv_head=spec.per_kv_head,
            score_block=spec.score_block,
            sinks=sinks,
            kernels=model.kernels,
        )
        return out, scores

    hidden, cache, scores = forward(model, params, cache, tokens, starts, attend, slots)
    return unembed(model, params, hidden), cache, scores


def accept(
    logits: Float[Array, "b T V"],
    drafts: Int[Array, "b gamma"],
    q: Float[Array, "b gamma V"] | None,
    requests: Requests,
    lengths: Int[Array, "b"],
    spec: SpecConfig,
    processors: Processors,
) -> tuple[Int[Array, "b"], Int[Array, "b"]]:
    """How many drafts stand, and the target's token after them.

    `logits` are those of `verify`, unprocessed; T = gamma + 1. `q` is what `draft` gave.
    """
    counts = None
    if requests.counts is not None:
        # Row i has seen t0 (counted when it was emitted) and d1..di.
        steps = jax.nn.one_hot(drafts, logits.shape[-1], dtype=jnp.int32).cumsum(1)
        steps = jnp.pad(steps, ((0, 0), (1, 0), (0, 0)))
        counts = requests.counts[:, None] + steps
    processed = process_logits(logits, requests.sampling, processors, requests.in_prompt, counts)
    if q is not None:
        p = jax.nn.softmax(processed, -1)
        return accept_rejection(drafts, q, p, requests.sampling.seed, requests.rounds)
    rows = jnp.arange(logits.shape[1], dtype=jnp.int32)
    positions = lengths[:, None] + 1 + rows[None, :]
    return accept_equal(drafts, draw_coupled(processed, requests.sampling, processors, positions))


def commit(
    requests: Requests,
    lengths: Int[Array, "b"],
    logits: Float[Array, "b T V"],
    drafts: Int[Array, "b gamma"],
    accepted: Int[Array, "b"],
    following: Int[Array, "b"],
    *,
    first: bool = False,
) -> tuple[Requests, Int[Array, "b"]]:
    """Emits the accepted drafts and the token after them, up to a stop token or the limit.

    Returns the requests and the new verified lengths. Requests that are done stay as they are.
    `first` marks the token that follows the prompt.
    """
    gamma = drafts.shape[1]
    row = jnp.arange(gamma + 1, dtype=jnp.int32)[None, :]
    end = accepted[:, None]
    candidates = jnp.pad(drafts, ((0, 0), (0, 1)))
    candidates = jnp.where(row == end, following[:, None], candidates)
    last_kind = jnp.where(accepted == gamma, jnp.int8(Kind.BONUS), jnp.int8(Kind.CORRECTED))
    if first:
        last_kind = jnp.full_like(last_kind, Kind.FIRST)
    kinds = jnp.where(row < end, jnp.int8(Kind.ACCEPTED), last_kind[:, None])

    is_stop = (candidates[:, :, None] == requests.stop_tokens[:, None, :]).any(-1) & (row <= end)
    until_stop = jnp.where(is_stop.any(1), jnp.argmax(is_stop, 1).astype(jnp.int32), gamma) + 1
    count = jnp.minimum(jnp.minimum(accepted + 1, until_stop), requests.limit - requests.emitted)
    count = jnp.where(requests.done, 0, count)
    kept = row < count[:, None]
    sequence = jnp.arange(count.shape[0], dtype=jnp.int32)[:, None]

    def append(buffer: Array, values: Array) -> Array:
        where = jnp.where(kept, requests.emitted[:, None] + row, buffer.shape[1])
        return buffer.at[sequence, where].set(values.astype(buffer.dtype), mode="drop")

    emitted = requests.emitted + count
    active = ~requests.done
    last = jnp.take_along_axis(candidates, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    stopped = (is_stop & kept).any(1)
    bad = (~jnp.isfinite(logits).all(-1)) & kept
    bad_position = jnp.where(
        bad.any(1), lengths + jnp.argmax(bad, 1).astype(jnp.int32), requests.bad_position
    )
    logprobs = requests.logprobs
    if logprobs is not None:
        chosen = jnp.take_along_axis(logits, candidates[:, :, None], axis=2)[:, :, 0]
        logprobs = append(logprobs, chosen - jax.nn.logsumexp(logits, -1))
    counts = requests.counts
    if counts is not None:
        counts = counts.at[sequence, candidates].add(kept.astype(jnp.int32))
    new = requests.replace(
        pending=jnp.where(active, last, requests.pending),
        tokens=append(requests.tokens, candidates),
        kinds=append(requests.kinds, kinds),
        logprobs=logprobs,
        emitted=emitted,
        done=requests.done | stopped | (emitted >= requests.limit),
        rounds=requests.rounds + active.astype(jnp.int32),
        drafts=jnp.where(active[:, None], drafts, requests.drafts)
        if not first
        else requests.drafts,
        accepted=jnp.where(active, jnp.minimum(accepted, count), 0),
        bad_position=bad_position,
        counts=counts,
    )
    return new, lengths + count


def select(
    spec: SpecConfig,
    scores: tuple[Array | None, ...],
    lengths: Int[Array, "b"],
    accepted: Int[Array, "b"],
    kernels: str = "auto",
    mesh: Mesh | None = None,
) -> Selection | None:
    """The keys that the next round's drafts attend to, from the key scores of `verify`.

    `lengths` are the verified rows before that verification; `accepted` how many drafts it kept;
    `kernels` which implementation ranks; `mesh` the model's. None for drafters that keep no
    selection.
    """
    return drafters.get(spec).select(spec, scores, lengths, accepted, kernels, mesh)


def spec_round(
    model: Transformer,
    params: Params,
    state: DecodeState,
    spec: SpecConfig,
    processors: Processors,
) -> DecodeState:
    """One iteration for every sequence: draft, verify, accept, select; done ones stand still."""
    with jax.named_scope("draft"):
        drafts, q, cache = draft(model, params, state, spec, processors)
    with jax.named_scope("verify"):
        tokens = jnp.concatenate([state.requests.pending[:, None], drafts], axis=1)
        logits, cache, scores = verify(model, params, cache, tokens, spec)
    with jax.named_scope("accept"):
        accepted, following = accept(
            logits, drafts, q, state.requests, cache.lengths, spec, processors
        )
        requests, lengths = commit(
            state.requests, cache.lengths, logits, drafts, accepted, following
        )
    with jax.named_scope("select"):
        selection = select(spec, scores, cache.lengths, accepted, model.kernels, model.mesh)
        if state.selection is not None and selection is not None:
            selection = state.selection.keep_where(state.requests.done, selection)
    state = DecodeState(cache.replace(lengths=lengths), requests, selection)
    return constrain_state(state, model.mesh)


def uses_rejection(spec: SpecConfig, processors: Processors) -> bool:
    """Whether drafts are judged by speculative sampling; greedy and plain need only agreement."""
    return spec.acceptance == "rejection" and spec.num_drafts > 0 and not processors.greedy
