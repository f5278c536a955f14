"""Converts checkpoints between Hugging Face folders (safetensors) and Orbax folders.

    python -m vegas_jax.convert --hf=Qwen3-8B --out=qwen3-8b-orbax
    python -m vegas_jax.convert --orbax=qwen3-8b-orbax --out=Qwen3-8B-again

An Orbax folder loads wherever a Hugging Face folder does, and each device reads only its part of
it. --out appears when it is complete. Exit codes: 0 done, 2 for input that cannot be used (one
sentence says why), 130 after Ctrl-C.
"""

import sys
import time
from collections.abc import Sequence

from absl import flags

from vegas_jax.checkpoint import conversion
from vegas_jax.cli.flags import DTYPES, parse_into
from vegas_jax.cli.terminal import Stderr, say_error
from vegas_jax.errors import InputError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments (by default sys.argv[1:]); returns the exit code."""
    try:
        values = _parse(sys.argv[1:] if argv is None else argv)
        if values.help:
            print(f"{__doc__}\nflags:{values.get_help()}")
            return 0
        _convert(values)
        return 0
    except (flags.Error, InputError) as error:
        say_error(str(error).removeprefix("ERROR:: "))  # absl's own prefix
        return 2
    except KeyboardInterrupt:
        say_error("interrupted: nothing was written")
        return 130
    except OSError as error:  # a full disk, for instance
        say_error(f"cannot write: {error.strerror or error}")
        return 2


def _convert(values: flags.FlagValues) -> None:
    _check(values)
    stderr = Stderr()
    start = time.perf_counter()
    with stderr.share(f"writing {values.out}") as progress:
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
