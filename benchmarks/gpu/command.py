"""What `benchmarks.gpu` and `benchmarks.gpu.random_weights` share: --shapes, and how they end."""

import argparse
import os
import sys
from collections.abc import Callable

import jax

MOST_TEXTS, MOST_ROWS = 1024, 2**20


def shape(text: str) -> tuple[int, int]:
    """A value of --shapes: BxS."""
    batch, _, rows = text.partition("x")
    if not (batch.isdecimal() and rows.isdecimal() and int(batch) and int(rows)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a batch and a length, like 8x32768")
    if int(batch) > MOST_TEXTS or int(rows) > MOST_ROWS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is larger than {MOST_TEXTS} texts of {MOST_ROWS} tokens"
        )
    return int(batch), int(rows)


def run(main: Callable[[], int]) -> int:
    """A command, which may be interrupted, and whose output may be cut off."""
    try:
        code = main()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
    except BrokenPipeError:
        pass
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"Does not fit into memory: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    # Programs that are still being compiled would be waited for.
    os._exit(130)
