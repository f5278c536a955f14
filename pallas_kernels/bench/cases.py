"""What is common to the ops' tables: compiling, checking and timing one row after another."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bench import timing
from pallas_kernels.dispatch import Implementation, lacks


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the rows are measured against.

    Attributes:
      bandwidth: bytes per second that it copies, read plus written.
      small: whether it has no accelerator, so that only a small shape runs.
      threads: that compile at once.
    """

    bandwidth: float
    small: bool
    threads: int


@dataclasses.dataclass(frozen=True)
class Check:
    """How far outputs are from the reference's.

    Attributes:
      error: the largest, in the op's own unit.
      right: whether it is within the tolerance.
    """

    error: float
    right: bool

    @property
    def text(self) -> str:
        """As it stands in a table."""
        return f"{self.error:.2g}" if self.right else f"WRONG: {self.error:.2g}"


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of a table.

    Attributes:
      kernels: the implementation's name, or a peer's.
      labels: further cells that tell the row from others.
      call: see `timing.looped`.
      rotation: inputs to time.
      check_rotation: inputs to check with.
      check: compares the outputs of the last call.
      peer: is not ours: that it cannot run is printed and no more.
    """

    kernels: str
    labels: tuple[str, ...]
    call: timing.Call
    rotation: timing.Rotation
    check_rotation: timing.Rotation
    check: Callable[[Any], Check]
    peer: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Attributes:
      case: which.
      seconds: a call takes; None if it did not run.
      check: None if it did not run.
      output_bytes: what a call writes.
      problem: why it did not run; empty if it did.
      failed: whether the bench fails with it.
    """

    case: Case
    seconds: float | None = None
    check: Check | None = None
    output_bytes: int = 0
    problem: str = ""
    failed: bool = False

    def cells(self, read_bytes: int, machine: Machine) -> list[str]:
        """Microseconds, TB/s, its fraction of the copy's, and the error; or what went wrong."""
        if self.seconds is None or self.check is None:
            return ["-", "-", "-", self.problem]
        rate = (read_bytes + self.output_bytes) / self.seconds
        return [
            f"{self.seconds * 1e6:.1f}",
            f"{rate / 1e12:.3f}",
            f"{rate / machine.bandwidth:.1%}",
            self.check.text,
        ]


def runnable(implementations: dict[str, Implementation]) -> list[str]:
    """Names of an op's implementations that this machine has, the one that "auto" prefers first."""
    names = ("mosaic_gpu", "triton", "xla")
    return [name for name in names if name in implementations and lacks(name) is None]


def compare(outputs: Iterable[tuple[jax.Array, jax.Array, float]]) -> Check:
    """Largest error of (actual, expected, tolerance), relative to its sequence's largest number.

    Sequences stand along the first axis: a long one averages to small numbers, a short one not.
    """
    errors, right = [], True
    for actual, expected, tolerance in outputs:
        shape = (expected.shape[0], -1)
        actual, expected = (x.astype(jnp.float32).reshape(shape) for x in (actual, expected))
        size = jnp.maximum(jnp.abs(expected).max(axis=1), jnp.finfo(jnp.float32).tiny)
        error = float((jnp.abs(actual - expected).max(axis=1) / size).max())
        errors.append(error)
        right &= error <= tolerance  # not if it is NaN
    return Check(max(errors), right)


def measure(cases: list[Case], floor: float, machine: Machine) -> Iterator[Outcome]:
    """Compiles all cases at once, then checks and times one after the other.

    Args:
      cases: on inputs of the same sizes.
      floor: the fewest seconds that a call may take.
      machine: that this runs on.
    """
    trips = timing.trips(floor)

    def compile_case(case: Case) -> Any:
        try:
            run = jax.jit(timing.looped(case.call, trips))
            return run.lower(jnp.float32(0), case.rotation).compile()
        except Exception as error:
            return error

    with ThreadPoolExecutor(machine.threads) as pool:
        programs = list(pool.map(compile_case, cases))
    for case, program in zip(cases, programs, strict=True):
        yield _run(case, program, trips)


def _run(case: Case, program: Any, trips: int) -> Outcome:
    """Runs a compiled case; `program` may be what was raised instead."""
    try:
        if isinstance(program, Exception):
            raise program
        outputs = jax.block_until_ready(program(jnp.float32(0), case.check_rotation))
        check = case.check(outputs)
        output_bytes = sum(x.nbytes for x in jax.tree.leaves(outputs))
        del outputs
        total = timing.seconds(lambda: program(jnp.float32(0), case.rotation))
    except Exception as error:
        refused = isinstance(error, ValueError) and "with kernels=" in str(error)
        problem = one_line(str(error) if refused else f"{type(error).__name__}: {error}")
        return Outcome(case, problem=problem, failed=not (refused or case.peer))
    calls = trips * len(case.rotation)
    return Outcome(case, total / calls, check, output_bytes, failed=not check.right)


def one_line(message: str, most: int = 160) -> str:
    """A message cut to fit a table's cell."""
    message = re.sub(r"\s+", " ", message).replace("|", "/").strip()
    return message if len(message) <= most else message[: most - 3] + "..."
