"""Device time of an op: dependent calls in one compiled loop, and its kernels alone."""

import math
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Call = Callable[..., Any]  # (trip, nudge, *inputs) -> outputs
Rotation = Sequence[tuple[Any, ...]]  # inputs of one shape after another
FLUSH_BYTES = 512 * 2**20  # what is read to put something else into the L2 cache


def looped(call: Call, trips: int) -> Callable[[jax.Array, Rotation], list[Any]]:
    """Dependent calls of an op in one program.

    A trip calls the op once for each element of the rotation. `call` gets the trip's number and a
    float32 scalar to add to an input: it is 0 times the first number of the previous outputs, where
    0 is an argument of the program, so that no call can begin before the previous one has ended,
    and no compiler can know it. All outputs are carried through the loop: none can be left out.

    Args:
      call: the op.
      trips: static, as it is for XLA: with a traced number the host would decide about each trip.

    Returns:
      A function of that 0, float32, and of the rotation, which gives the last trip's outputs.
    """

    def run(zero: jax.Array, rotation: Rotation) -> list[Any]:
        def body(trip: jax.Array, carried: list[Any]) -> list[Any]:
            outputs = carried[-1]
            found = []
            for inputs in rotation:
                first = jax.tree.leaves(outputs)[0].ravel()[0]
                # What an op does to an input that is the same each time must not leave the loop
                # either; XLA's GPU backend keeps to it, its CPU backend does not.
                inputs, _ = lax.optimization_barrier((inputs, trip))
                outputs = call(trip, zero * first.astype(jnp.float32), *inputs)
                found.append(outputs)
            return found

        shapes = jax.eval_shape(call, jnp.int32(0), zero, *rotation[0])
        start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return lax.fori_loop(0, trips, body, [start] * len(rotation))

    return run


def trips(floor: float) -> int:
    """Trips of a loop whose calls take `floor` seconds each at the least; a power of two."""
    if jax.default_backend() == "cpu":
        return 2
    # About 15 ms, next to which starting the program and waiting for it is little.
    return min(256, max(8, 2 ** round(math.log2(0.015 / (floor + 5e-6)))))


def seconds(run: Callable[[], Any], repeats: int = 5) -> float:
    """Median wall time of `run`, which has run before; waits for its results."""
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def lone(call: Call, outputs: Sequence[str]) -> Callable[..., Any]:
    """One call of the op and no more, as a function of its inputs, for the outputs named."""

    def run(*inputs: Any) -> list[jax.Array]:
        found = call(jnp.int32(0), jnp.float32(0), *inputs)
        return [found[name] for name in outputs if name in found]

    return run


def kernel_seconds(run: Callable[[], Any], calls: int = 10) -> float | None:
    """Time that the GPU is busy with the kernels of `run`, without gaps between them: the mean.

    What CUPTI says of each kernel. Each call finds other data in the L2 cache. None without a GPU.
    """
    if jax.default_backend() != "gpu":
        return None

    @jax.jit
    def flush(x: jax.Array) -> jax.Array:
        return x.max()

    other_data = jnp.zeros(FLUSH_BYTES // 4, jnp.float32)
    jax.block_until_ready((run(), flush(other_data)))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                jax.block_until_ready(flush(other_data))
                jax.block_until_ready(run())
        found = [*pathlib.Path(folder).rglob("*.xplane.pb")]
        profile = jax.profiler.ProfileData.from_file(str(found[0]))
    total = 0.0
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                events = ((event, dict(event.stats)) for event in line.events)
                total += sum(e.duration_ns for e, s in events if s.get("hlo_module") != "jit_flush")
    return total * 1e-9 / calls


def loop_overhead() -> float:
    """Seconds a trip takes whose op does no more than to add the nudge to a step's queries."""
    count = trips(0.0)

    def add(trip: jax.Array, nudge: jax.Array, q: jax.Array) -> dict[str, jax.Array]:
        # The next nudge is of a number of its own: reading it from `q` would copy all of `q`.
        return {"nudge": nudge + 1, "q": q + nudge.astype(q.dtype)}

    run = jax.jit(looped(add, count))
    rotation = [(jnp.zeros((8, 1, 32, 128), jnp.bfloat16),)]
    jax.block_until_ready(run(jnp.float32(0), rotation))
    return seconds(lambda: run(jnp.float32(0), rotation)) / count


def copy_bandwidth(size: int) -> dict[str, float]:
    """Bytes per second, read plus written, of copying `size` bytes, by the way it is done.

    Each way issues its copies one after another without a loop on the device, whose handling of a
    large carried array would be timed too.
    """
    ways = {
        "copy": jax.jit(jnp.copy),
        "x + 1": jax.jit(lambda x: x + 1),
        "x + 1 in place": jax.jit(lambda x: x + 1, donate_argnums=0),
    }
    copies = 20 if jax.default_backend() != "cpu" else 2
    found = {}
    for name, way in ways.items():
        x = jnp.zeros(size // 4, jnp.float32)

        def run(way: Callable[[jax.Array], jax.Array] = way) -> jax.Array:
            nonlocal x
            for _ in range(copies):
                x = way(x)
            return x

        jax.block_until_ready(run())
        found[name] = 2 * size * copies / seconds(run)
    return found
