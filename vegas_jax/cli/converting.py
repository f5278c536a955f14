"""Converts checkpoints between Hugging Face folders (safetensors) and Orbax folders.

    python -m vegas_jax.convert --hf=Qwen3-8B --out=qwen3-8b-orbax
    python -m vegas_jax.convert --orbax=qwen3-8b-orbax --out=Qwen3-8B-again

An Orbax folder loads wherever a Hugging Face folder does, and each device reads only its part of
it. --out appears when it is complete. Exit codes: 0 done, 2 for input that cannot be used (one
sentence says why), 130 after Ctrl-C, 143 after SIGTERM.
"""

import signal
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

from absl import flags

from vegas_jax.checkpoint import conversion
from vegas_jax.cli.flags import DTYPES, parse_into
from vegas_jax.cli.terminal import Stderr, say_error
from vegas_jax.errors import InputError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments (by default sys.argv[1:]); returns the exit code."""
    stop = Stop()
    try:
        values = _parse(sys.argv[1:] if argv is None else argv)
        if values.help:
            print(f"{__doc__}\nflags:{values.get_help()}")
            return 0
        with stop:
            _convert(values, stop)
        return 0
    except (flags.Error, InputError) as error:
        say_error(str(error).removeprefix("ERROR:: "))  # absl's own prefix
        return 2
    except KeyboardInterrupt:
        warnings.simplefilter("ignore")  # coroutines that Orbax does not get to await
        say_error("interrupted: nothing was written")
        return 128 + stop.signal
    except OSError as error:  # a full disk, for instance
        say_error(f"cannot write: {error.strerror or error}")
        return 2


class Stop:
    """Ctrl-C, and what else asks a process to end: KeyboardInterrupt here, and once more later.

    Where it arrives in a callback, Python or a library drops the exception.
    """

    def __init__(self) -> None:
        self.signal = signal.SIGINT
        self._asked = False

    def __enter__(self) -> None:
        hook = sys.unraisablehook

        def print_others(unraisable: Any) -> None:
            if not isinstance(unraisable.exc_value, KeyboardInterrupt):
                hook(unraisable)

        self._hook, sys.unraisablehook = hook, print_others
        names = ("SIGINT", "SIGTERM", "SIGHUP")  # the last is not everywhere
        numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
        self._handlers = {number: signal.signal(number, self._raise) for number in numbers}

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        sys.unraisablehook = self._hook

    def _raise(self, number: int, frame: object) -> None:
        self.signal, self._asked = signal.Signals(number), True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raises KeyboardInterrupt where the process was asked to end, however long ago."""
        if self._asked:
            raise KeyboardInterrupt


def _convert(values: flags.FlagValues, stop: Stop) -> None:
    _check(values)
    stderr = Stderr()
    start = time.perf_counter()
    with stderr.share(f"writing {values.out}") as show:

        def progress(share: float) -> None:
            stop.check()
            show(share)

        if values.hf is not None:
            conversion.to_orbax(
                values.hf,
                values.out,
                None if values.dtype == "auto" else values.dtype,
                dequantize=values.dequantize,
                overwrite=values.overwrite,
                progress=progress,
            )
        else:
            conversion.to_huggingface(
                values.orbax, values.out, overwrite=values.overwrite, progress=progress
            )
    stderr.note(f"wrote {values.out} in {time.perf_counter() - start:.1f} s")


def _parse(argv: Sequence[str]) -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_string("hf", None, "Hugging Face folder to convert, or the shipped name.", values)
    flags.DEFINE_string("orbax", None, "Orbax folder to convert back.", values)
    flags.DEFINE_string("out", None, "Folder to write; it must not exist yet.", values)
    flags.DEFINE_enum(
        "dtype",
        "auto",
        list(DTYPES),
        "With --hf: what matrices and biases are written in; auto leaves them as they are stored,"
        " and makes bfloat16 of FP8.",
        values,
    )
    flags.DEFINE_boolean(
        "dequantize",
        False,
        "With --hf: write experts stored as MXFP4 as --dtype (auto: bfloat16), in which they take"
        " four times the room.",
        values,
    )
    flags.DEFINE_boolean(
        "overwrite", False, "Replace the checkpoint at --out, once the new one is complete.", values
    )
    flags.DEFINE_boolean("help", False, "Show this help.", short_name="h", flag_values=values)
    parse_into(values, "vegas_jax.convert", argv, "give folders with --hf and --out")
    return values


def _check(values: flags.FlagValues) -> None:
    for name in ("hf", "orbax", "out"):
        if getattr(values, name) == "":
            raise InputError(f"--{name} is empty: give it a value or leave it out")
    if (values.hf is None) == (values.orbax is None):
        raise InputError("give one of --hf and --orbax: the folder to convert")
    if values.out is None:
        raise InputError("--out is missing: the folder to write")
    for name in ("dtype", "dequantize"):
        if values.orbax is not None and values[name].present:
            raise InputError(f"--{name} needs --hf: with --orbax, dtypes stay as they are")
