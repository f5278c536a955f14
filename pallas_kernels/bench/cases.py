"""What is common to the ops' tables: compiling, checking and timing their rows."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bench import timing
from pallas_kernels.dispatch import Implementation, lacks


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the rows are measured on.

    Attributes:
      bandwidth: bytes per second that it copies, read plus written.
      small: whether it has no GPU, so that only a small shape runs.
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


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of a table.

    Attributes:
      kernels: the implementation's name, or a peer's.
      label: tells the row from the others of its implementation.
      call: see `timing.looped`.
      check: compares the outputs of a last call with what the group expects.
      layout: of its inputs, see `Group`.
      alone: outputs of a lone call, whose kernels are timed; none: they are not.
      peer: is not ours: that it cannot run is printed and no more.
    """

    kernels: str
    label: str
    call: timing.Call
    check: Callable[[Any, Any], Check]
    layout: str = ""
    alone: tuple[str, ...] = ()
    peer: bool = False


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows that share inputs.

    Attributes:
      names: what its rows begin with.
      prepare: makes, by layout, a rotation to check with and a rotation of the same shapes to time.
      expect: what the reference makes of what `prepare` gives; traceable.
      read_bytes: that a call cannot but read.
      cases: the rows.
      first: the inputs of a lone call, from those of a loop's.
    """

    names: tuple[str, ...]
    prepare: Callable[[], dict[str, tuple[timing.Rotation, timing.Rotation]]]
    expect: Callable[[Any], Any]
    read_bytes: int
    cases: list[Case]
    first: Callable[[tuple[Any, ...]], tuple[Any, ...]] = lambda inputs: inputs

    def floor(self, machine: Machine) -> float:
        """The fewest seconds a call may take."""
        return self.read_bytes / machine.bandwidth


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Attributes:
      seconds: a call takes in a loop; None if it did not run.
      kernel_seconds: its kernels take; None if that was not measured.
      check: None if it did not run.
      output_bytes: what a call writes.
      problem: why it did not run; empty if it did.
      failed: whether the bench fails with it.
    """

    seconds: float | None = None
    kernel_seconds: float | None = None
    check: Check | None = None
    output_bytes: int = 0
    problem: str = ""
    failed: bool = False

    def cells(self, group: Group, machine: Machine) -> list[str]:
        """Microseconds, TB/s, its fraction of the copy's, and the error; or what went wrong."""
        if self.seconds is None or self.check is None:
            return ["-", "-", "-", "-", self.problem]
        rate = (group.read_bytes + self.output_bytes) / self.seconds
        return [
            f"{self.seconds * 1e6:.1f}",
            "" if self.kernel_seconds is None else f"{self.kernel_seconds * 1e6:.1f}",
            f"{rate / 1e12:.3f}",
            f"{rate / machine.bandwidth:.1%}",
            ("" if self.check.right else "WRONG: ") + f"{self.check.error:.2g}",
        ]


# Of `Outcome.cells`, with their widths.
COLUMNS = {"us": 8, "kernels us": 8, "TB/s": 5, "of copy": 7, "error": 7}


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


def measure(groups: list[Group], machine: Machine) -> Iterator[tuple[Group, Case, Outcome]]:
    """Compiles everything first, then checks and times one case after another."""
    with ThreadPoolExecutor(machine.threads) as pool:
        compiled = [_compile(group, machine, pool) for group in groups]
    for group, (expect, programs) in zip(groups, compiled, strict=True):
        inputs = group.prepare()
        expected = expect.result()(inputs)
        for case, program in zip(group.cases, programs, strict=True):
            yield group, case, _run(group, case, program, inputs[case.layout], expected, machine)
        del inputs, expected  # before the next group's are made


def _compile(
    group: Group, machine: Machine, pool: ThreadPoolExecutor
) -> tuple[Future[Any], list[Future[tuple[Any, Any]]]]:
    """The programs of the reference and of the cases (a loop, a lone call), on their way."""
    shapes = jax.eval_shape(group.prepare)
    trips = timing.trips(group.floor(machine))

    def reference() -> Any:
        # It runs once: looking for its best matrix products would take longer.
        options = {"xla_gpu_autotune_level": 0}
        return jax.jit(group.expect).lower(shapes).compile(options)

    def program(case: Case) -> tuple[Any, Any]:
        rotation, _ = shapes[case.layout]
        run = jax.jit(timing.looped(case.call, trips))
        loop = run.lower(jnp.float32(0), rotation).compile()
        if machine.small or not case.alone:
            return loop, None
        inputs = jax.eval_shape(group.first, rotation[0])
        return loop, jax.jit(timing.lone(case.call, case.alone)).lower(*inputs).compile()

    return pool.submit(reference), [pool.submit(program, case) for case in group.cases]


def _run(
    group: Group,
    case: Case,
    program: Future[tuple[Any, Any]],
    inputs: Any,
    expected: Any,
    machine: Machine,
) -> Outcome:
    to_check, to_time = inputs
    zero = jnp.float32(0)
    calls = timing.trips(group.floor(machine)) * len(to_time)
    try:
        loop, alone = program.result()
        outputs = loop(zero, to_check)[-1]
        check = case.check(outputs, expected)
        output_bytes = sum(x.nbytes for x in jax.tree.leaves(outputs))
        seconds = timing.seconds(lambda: loop(zero, to_time)) / calls
        kernel_seconds = None
        if alone is not None:
            first = group.first(to_time[0])
            kernel_seconds = timing.kernel_seconds(lambda: alone(*first))
    except Exception as error:
        refused = isinstance(error, ValueError) and "with kernels=" in str(error)
        problem = one_line(str(error) if refused else f"{type(error).__name__}: {error}")
        return Outcome(problem=problem, failed=not (refused or case.peer))
    return Outcome(seconds, kernel_seconds, check, output_bytes, failed=not check.right)


def one_line(message: str, most: int = 160) -> str:
    """A message cut to fit a table's cell."""
    message = re.sub(r"\s+", " ", message).replace("|", "/").strip()
    return message if len(message) <= most else message[: most - 3] + "..."
