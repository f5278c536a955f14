"""What the parts of a round take, each as a program of its own, and what they cannot but take."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.workload import Workload
from vegas_jax import SpecConfig, spec
from vegas_jax.compiled import decode_jit
from vegas_jax.drafters.selection import key_budget
from vegas_jax.model.transformer import Transformer

REPEATS = 5


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds that reading what a forward pass must read takes, at the machine's copy bandwidth.

    Attributes:
      bandwidth: bytes per second.
      weights: bytes of all weights but the embedding, of which a few rows are read.
      row: bytes of a position's keys and values, all layers.
    """

    bandwidth: float
    weights: int
    row: int

    @classmethod
    def of(cls, model: Transformer, params: Any, bandwidth: float) -> "Roofline":
        """`params` may be shapes."""
        read = {name: x for name, x in params.items() if name != "embed"}
        weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(read))
        c = model.config
        row = 2 * c.num_layers * c.num_kv_heads * c.head_dim * model.dtype.itemsize
        return cls(bandwidth, weights, row)

    def seconds(self, keys: int) -> float:
        """Of a pass that reads `keys` positions, over all sequences."""
        return (self.weights + self.row * keys) / self.bandwidth


@dataclasses.dataclass(frozen=True)
class Parts:
    """Seconds of a method's parts.

    Attributes:
      draft: one draft step.
      verify: one verification, without selection.
      select: one selection; the scores that it ranks are part of `verify`.
    """

    draft: float
    verify: float
    select: float

    def round(self, gamma: int) -> float:
        """A round of gamma drafts."""
        return gamma * self.draft + self.verify + self.select


def compile_decode(work: Workload, config: SpecConfig) -> Callable[[Any, int], Any]:
    """The wide model's loop over rounds: (state, at most so many rounds) -> state."""
    program = decode_jit.lower(
        model=work.models.wide,
        params=shapes_of(work.models.wide_params),
        state=state_shapes(work, config),
        spec=config,
        processors=work.processors,
        max_rounds=jax.ShapeDtypeStruct((), jnp.int32),
        stop_on_any_done=jax.ShapeDtypeStruct((), jnp.bool_),
    ).compile()

    def run(state: Any, rounds: int) -> Any:
        return program(
            params=work.models.wide_params,
            state=state,
            max_rounds=jnp.int32(rounds),
            stop_on_any_done=jnp.bool_(False),
        )

    return run


class PartPrograms:
    """The compiled parts of a round; compiling begins at once, in `pool`.

    Each is a loop on the device, as in decoding: a part that the host starts pays for that.
    """

    def __init__(self, work: Workload, config: SpecConfig, pool: Executor) -> None:
        model, processors = work.models.wide, work.processors
        self.work, self.config = work, config
        params, state = shapes_of(work.models.wide_params), state_shapes(work, config)

        def draft(params: Any, state: spec.DecodeState) -> tuple[Any, Any]:
            drafts, q, cache = spec.draft(model, params, state, config, processors)
            return state.replace(cache=cache), (drafts, q)

        def verify(params: Any, state: spec.DecodeState) -> tuple[Any, Any]:
            tokens = jnp.concatenate(
                [state.requests.pending[:, None], state.requests.drafts], axis=1
            )
            logits, cache, scores = spec.verify(model, params, state.cache, tokens, config)
            return state.replace(cache=cache), (logits, scores)

        def select(scores: Any, state: spec.DecodeState) -> tuple[Any, Any]:
            # Other lengths each time, or it would leave the loop.
            lengths = state.cache.lengths
            accepted = jnp.zeros_like(lengths)
            found = spec.select(config, scores, lengths, accepted, model.kernels)
            return state.replace(cache=state.cache.replace(lengths=lengths - 1)), found

        def compiled(part: Callable[..., Any], given: Any) -> Any:
            return jax.jit(looped(part), donate_argnames="state").lower(given, state, 0).compile()

        _, (_, scores) = jax.eval_shape(verify, params, state)
        self.select: Future[Any] | None = None
        if config.method == "vegas":
            self.select = pool.submit(compiled, select, scores)
        self.draft = pool.submit(compiled, draft, params)
        self.verify = pool.submit(compiled, verify, params)

    def wait(self) -> None:
        """Until all is compiled."""
        for program in (self.draft, self.verify, self.select):
            if program is not None:
                program.result()

    def measure(self, state: spec.DecodeState) -> Parts:
        """Times the parts; `state` is donated."""
        params, gamma = self.work.models.wide_params, self.config.num_drafts
        state, draft, _ = time_loop(self.draft.result(), params, state, 4)
        state, verify, (_, scores) = time_loop(self.verify.result(), params, state, 8)
        select = 0.0
        if self.select is not None:
            _, select, _ = time_loop(self.select.result(), scores, state, 64)
        return Parts(draft / gamma, verify, select)


def looped(part: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """A part that hands its state on, so many times; its outputs are carried, so all are made."""

    def run(given: Any, state: Any, count: Any) -> tuple[Any, Any]:
        shapes = jax.eval_shape(part, given, state)[1]
        outputs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.fori_loop(0, count, lambda _, carry: part(given, carry[0]), (state, outputs))

    return run


def time_loop(program: Any, given: Any, state: Any, count: int) -> tuple[Any, float, Any]:
    """The state afterwards, seconds of a trip, the outputs."""
    state, outputs = jax.block_until_ready(program(given, state, 1))
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        state, outputs = jax.block_until_ready(program(given, state, count))
        found.append((time.perf_counter() - began) / count)
    return state, statistics.median(found), outputs


def draft_keys(work: Workload, config: SpecConfig) -> int:
    """Keys that a draft step reads, over all sequences; about, since the tail grows."""
    budget = int(key_budget(config, jnp.array([work.length], jnp.int32))[0])
    return work.batch * (min(budget, work.length) + config.num_speculative_tokens // 2 + 1)


def state_shapes(work: Workload, config: SpecConfig) -> Any:
    """Of the wide model's state."""
    return jax.eval_shape(lambda: work.empty(work.models.wide, config))


def shapes_of(arrays: Any) -> Any:
    """Shapes and dtypes."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
