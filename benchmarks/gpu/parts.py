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


def compile_decode(work: Workload, config: SpecConfig) -> Any:
    """The loop over rounds: (params, state, max_rounds, stop_on_any_done) -> state."""
    from vegas_jax.compiled import decode_jit

    return decode_jit.lower(
        model=work.models.wide,
        params=shapes_of(work.models.wide_params),
        state=state_shapes(work, config),
        spec=config,
        processors=work.processors,
        max_rounds=jax.ShapeDtypeStruct((), jnp.int32),
        stop_on_any_done=jax.ShapeDtypeStruct((), jnp.bool_),
    ).compile()


class PartPrograms:
    """The compiled parts of a round; compiling begins at once, in `pool`."""

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

        def select(lengths: Any, scores: Any) -> Any:
            accepted = jnp.zeros_like(lengths)
            return spec.select(config, scores, lengths, accepted, model.kernels)

        def compiled(part: Callable[..., Any], donated: str, *shapes: Any) -> Any:
            return jax.jit(part, donate_argnames=donated or None).lower(*shapes).compile()

        _, (_, scores) = jax.eval_shape(verify, params, state)
        self.select: Future[Any] | None = None
        if config.method == "vegas":
            self.select = pool.submit(compiled, select, "", state.cache.lengths, scores)
        self.draft = pool.submit(compiled, draft, "state", params, state)
        self.verify = pool.submit(compiled, verify, "state", params, state)

    def wait(self) -> None:
        """Until all is compiled."""
        for program in (self.draft, self.verify, self.select):
            if program is not None:
                program.result()

    def measure(self, state: spec.DecodeState) -> Parts:
        """Times the parts; `state` is donated."""
        params, gamma = self.work.models.wide_params, self.config.num_drafts
        draft, verify = self.draft.result(), self.verify.result()
        found: list[float] = []
        for part, calls in ((draft, 2), (verify, 4)):
            state, outputs = jax.block_until_ready(part(params, state))
            times = []
            for _ in range(REPEATS):
                began = time.perf_counter()
                for _ in range(calls):
                    state, outputs = part(params, state)
                jax.block_until_ready(outputs)
                times.append((time.perf_counter() - began) / calls)
            found.append(statistics.median(times))
        selected = 0.0
        if self.select is not None:
            lengths, scores, calls = state.cache.lengths, outputs[1], 20
            select = self.select.result()
            jax.block_until_ready(select(lengths, scores))
            began = time.perf_counter()
            for _ in range(calls):
                last = select(lengths, scores)
            jax.block_until_ready(last)
            selected = (time.perf_counter() - began) / calls
        return Parts(found[0] / gamma, found[1], selected)


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
