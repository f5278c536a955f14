"""What the parts of a round take, and what they cannot but take."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.workload import Decoding
from vegas_jax import SpecConfig, spec
from vegas_jax.compiled import decode_jit
from vegas_jax.drafters.selection import key_budget
from vegas_jax.model.transformer import Transformer

REPEATS = 5
FEW_DRAFTS, MANY_DRAFTS = 2, 6  # of the rounds that tell what a draft costs


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
      verify: one verification, and all that a round does but drafts and selection.
      select: one selection; making the scores that it ranks is part of `verify`.
    """

    draft: float
    verify: float
    select: float

    def round(self, gamma: int) -> float:
        """A round of gamma drafts."""
        return gamma * self.draft + self.verify + self.select


def compile_decode(work: Decoding, config: SpecConfig) -> Callable[[Any, int], Any]:
    """The large model's loop over rounds: (state, at most so many rounds) -> state."""
    program = decode_jit.lower(
        model=work.model,
        params=shapes_of(work.params),
        state=state_shapes(work, config),
        spec=config,
        processors=work.processors,
        max_rounds=jax.ShapeDtypeStruct((), jnp.int32),
        stop_on_any_done=jax.ShapeDtypeStruct((), jnp.bool_),
    ).compile()

    def run(state: Any, rounds: int) -> Any:
        return program(
            params=work.params,
            state=state,
            max_rounds=jnp.int32(rounds),
            stop_on_any_done=jnp.bool_(False),
        )

    return run


class PartPrograms:
    """Times the parts of a method's round where they are: in the loop that decodes.

    A draft is what one more of them adds to a round, verification what is left of it (with
    acceptance, sampling and all else that a round does). Selection alone is a loop of its own.
    Compiling begins at once, in `pool`.
    """

    def __init__(self, work: Decoding, config: SpecConfig, pool: Executor) -> None:
        self.work, self.config, self.pool = work, config, pool
        self.loops: dict[SpecConfig, Future[Any]] = {}
        for gamma in (FEW_DRAFTS, MANY_DRAFTS):
            self.loop(with_drafts(config, gamma))
        self.select: Future[Any] | None = None
        if config.method == "vegas":
            self.select = pool.submit(compile_select, work, config)

    def loop(self, config: SpecConfig) -> "Future[Any]":
        """`compile_decode`, compiled once."""
        if config not in self.loops:
            self.loops[config] = self.pool.submit(compile_decode, self.work, config)
        return self.loops[config]

    def wait(self) -> None:
        """Until all is compiled."""
        for program in (*self.loops.values(), self.select):
            if program is not None:
                program.result()

    def measure(self) -> Parts:
        """Times the parts."""
        few, many = (
            round_seconds(self.work, config, program.result())[0]
            for config, program in self.loops.items()
        )
        draft = (many - few) / (MANY_DRAFTS - FEW_DRAFTS)
        select = 0.0
        if self.select is not None:
            state = self.work.begin_large(self.config)
            scores = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype), score_shapes(self.work, self.config)
            )
            select = time_loop(self.select.result(), scores, state, 64)[1]
        return Parts(draft, many - MANY_DRAFTS * draft - select, select)


def with_drafts(config: SpecConfig, gamma: int) -> SpecConfig:
    """The same with gamma drafts a round."""
    return dataclasses.replace(config, num_speculative_tokens=gamma)


def round_seconds(work: Decoding, config: SpecConfig, run: Any) -> tuple[float, float]:
    """Seconds and a sequence's tokens of a round, while no sequence is done."""
    state = work.begin_large(config)
    rounds = max(1, (work.new_tokens - 1) // (config.num_drafts + 1) - 2)
    state = run(state, 2)
    before = np.asarray(state.requests.emitted)
    began = time.perf_counter()
    state = run(state, rounds)
    emitted = np.asarray(state.requests.emitted) - before
    return (time.perf_counter() - began) / rounds, float(emitted.mean()) / rounds


def score_shapes(work: Decoding, config: SpecConfig) -> Any:
    """Of what verification hands to selection."""

    def verify(params: Any, state: spec.DecodeState) -> Any:
        tokens = jnp.concatenate([state.requests.pending[:, None], state.requests.drafts], axis=1)
        return spec.verify(work.model, params, state.cache, tokens, config)[2]

    return jax.eval_shape(verify, shapes_of(work.params), state_shapes(work, config))


def compile_select(work: Decoding, config: SpecConfig) -> Any:
    """A loop of selections; for `time_loop`."""

    def select(scores: Any, state: spec.DecodeState) -> tuple[Any, Any]:
        # Other lengths each time, or it would leave the loop.
        lengths = state.cache.lengths
        accepted = jnp.zeros_like(lengths)
        found = spec.select(config, scores, lengths, accepted, work.model.kernels)
        return state.replace(cache=state.cache.replace(lengths=lengths - 1)), found

    def run(scores: Any, state: Any, count: Any) -> tuple[Any, Any]:
        shapes = jax.eval_shape(select, scores, state)[1]
        found = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.fori_loop(
            0, count, lambda _, carry: select(scores, carry[0]), (state, found)
        )

    given = score_shapes(work, config), state_shapes(work, config)
    return jax.jit(run, donate_argnames="state").lower(*given, 0).compile()


def time_loop(program: Any, given: Any, state: Any, count: int) -> tuple[Any, float]:
    """The state afterwards, seconds of a trip."""
    state, _ = jax.block_until_ready(program(given, state, 1))
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        state, _ = jax.block_until_ready(program(given, state, count))
        found.append((time.perf_counter() - began) / count)
    return state, statistics.median(found)


def draft_keys(work: Decoding, config: SpecConfig) -> int:
    """Keys that a draft step reads, over all sequences; about, since the tail grows."""
    budget = int(key_budget(config, jnp.array([work.length], jnp.int32))[0])
    return work.batch * (min(budget, work.length) + config.num_speculative_tokens // 2 + 1)


def state_shapes(work: Decoding, config: SpecConfig) -> Any:
    """Of the large model's state."""
    return jax.eval_shape(lambda: work.empty(work.model, config))


def shapes_of(arrays: Any) -> Any:
    """Shapes and dtypes."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
