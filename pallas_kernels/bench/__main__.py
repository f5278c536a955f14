"""Prints a table for each op: is it right on this machine, and how fast?"""

import argparse
import datetime
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import NoReturn

import jax

from pallas_kernels.bench import grouped, select, sparse, timing, verify
from pallas_kernels.bench.cases import Machine
from pallas_kernels.dispatch import device_name

OPS = {"verify": verify.run, "sparse": sparse.run, "select": select.run, "grouped": grouped.run}
TITLES = {
    "verify": "verify_attention: T tokens over the whole cache, scored by the first and last",
    "sparse": "sparse_attention: a step over listed blocks",
    "select": "select_top_k",
    "grouped": "grouped_matmul: tokens through their experts",
}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence."""

    def error(self, message: str) -> NoReturn:
        """Exits with 2."""
        self.exit(2, f"{message[:1].upper()}{message[1:]}.\n")


def ops(text: str) -> list[str]:
    """The value of --op."""
    names = text.split(",")
    for name in names:
        if name not in OPS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(OPS)}")
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; 1 if an op is wrong or fails."""
    parser = Parser("python -m pallas_kernels.bench", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--op", type=ops, default=list(OPS), help=f"some of {','.join(OPS)}; all by default"
    )
    parser.add_argument("--quick", action="store_true", help="one or two shapes of each op")
    parser.add_argument(
        "--threads",
        type=int,
        default=min(8, os.cpu_count() or 1),
        help="programs compiled at once; default %(default)s",
    )
    chosen = parser.parse_args(arguments)
    if chosen.threads < 1:
        parser.error(f"argument --threads: must be at least 1, but is {chosen.threads}")

    small = jax.default_backend() != "gpu"
    if small:
        print("There is no GPU here: a small shape through XLA, whose times mean little.\n")
    print(f"{datetime.date.today()}, {device_name()}, {versions()}")
    copies = timing.copy_bandwidth(2**26 if small else 2**31)
    found = ", ".join(f"{rate / 1e12:.3f} ({name})" for name, rate in copies.items())
    print(f"device copy, TB/s read + written: {found}; the best is what rates are compared with")
    print(f"a trip of the timing loop around an empty op: {timing.loop_overhead() * 1e6:.1f} us")

    machine = Machine(max(copies.values()), small, chosen.threads)
    right = True
    for op in chosen.op:
        print(f"\n### {TITLES[op]}\n")
        right &= OPS[op](machine, chosen.quick)
    return 0 if right else 1


def versions() -> str:
    """Of what the numbers depend on."""
    driver = pathlib.Path("/sys/module/nvidia/version")
    named = f", driver {driver.read_text().strip()}" if driver.exists() else ""
    return f"jax {jax.__version__}{named}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        os._exit(130)  # programs that are still being compiled would be waited for
    except BrokenPipeError:  # nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
