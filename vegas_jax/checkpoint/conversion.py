"""Hugging Face folders to Orbax folders and back, whole or not at all.

What is written lies in a hidden folder beside the destination until it is complete. A process that
is killed leaves that folder behind, which does not load either: config.json is its last file.
"""

import contextlib
import json
import math
import os
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from vegas_jax.checkpoint.export import hub_plan, split
from vegas_jax.checkpoint.hf_config import (
    CONFIG_FILE,
    GENERATION_FILE,
    read_config,
    read_fp8_block,
)
from vegas_jax.checkpoint.huggingface import (
    ORBAX_PARAMS,
    is_orbax,
    read_leaves,
    resolve,
    stored_dtype,
)
from vegas_jax.checkpoint.json_fields import Fields
from vegas_jax.checkpoint.layout import plan
from vegas_jax.checkpoint.safetensors_files import SHARD_BYTES, Entry, write_tensors
from vegas_jax.checkpoint.tensors import open_tensors
from vegas_jax.errors import CheckpointError, InputError
from vegas_jax.text import chat, tokenizer

# Copied byte by byte, where there are any.
COPIED = (GENERATION_FILE, tokenizer.TOKENIZER_FILE, chat.CONFIG_FILE, chat.TEMPLATE_FILE)

_ATTEMPTS, _PAUSE = 50, 0.05  # seconds

Progress = Callable[[float], None]  # takes the share that is done


def to_orbax(
    source: str | Path,
    out: str | Path,
    dtype: Any = None,
    *,
    dequantize: bool = False,
    overwrite: bool = False,
    progress: Progress = lambda share: None,
) -> None:
    """Writes the checkpoint in a Hugging Face folder as an Orbax folder.

    On the host this takes about three times the memory of the largest parameter: see
    `vegas_jax.checkpoint.orbax.save_params`.

    Args:
      source: the folder, or the name of a shipped checkpoint.
      out: what is written.
      dtype: of matrices and biases: bfloat16, float16 or float32; None leaves each as it is
        stored, and makes bfloat16 of FP8. Norm scales stay as exact as they are stored.
      dequantize: whether experts stored as MXFP4 become `dtype`, or bfloat16.
      overwrite: whether a checkpoint at `out` is replaced, once the new one is complete.
      progress: called as parameters are written.

    Raises:
      CheckpointError: the source cannot be used, or `out` cannot be written.
      InputError: `out` is in the way, or another `dtype`.
    """
    from vegas_jax.checkpoint import orbax  # slow to import

    folder = resolve(source)
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint {folder} is no Hugging Face folder, but a GGUF file")
    if is_orbax(folder):
        raise CheckpointError(f"checkpoint {folder} is an Orbax folder already")
    fields = Fields.read(folder / CONFIG_FILE)
    config = read_config(folder, dequantize=dequantize)
    with replacing(Path(out), folder, overwrite) as target, contextlib.ExitStack() as files:
        tensors = open_tensors(folder, files, read_fp8_block(folder))
        leaves = read_leaves(tensors, config, dtype, folder)
        sources = {path: leaf.sources for path, leaf in plan(config, tensors).items()}
        sizes = {path: _size(shapes.values()) for path, shapes in sources.items()}
        orbax.save_params(target, _counted(leaves, sizes, progress), sizes)
        dtypes = {
            path: _stored_as(path, stored_dtype([tensors[name] for name in names]), dtype)
            for path, names in sources.items()
        }
        main = dtypes["embed"]
        others = {path: name for path, name in dtypes.items() if name != main}
        orbax.Record(main, others).write(target)
        _copy(folder, target)
        packed = config.moe is not None and config.moe.packed
        _write_config(fields, target, None if dtype is None else main, packed)


def to_huggingface(
    source: str | Path,
    out: str | Path,
    *,
    overwrite: bool = False,
    progress: Progress = lambda share: None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes the checkpoint in an Orbax folder as a Hugging Face folder.

    Tensors have the names and layouts of the hub, whatever those were that `to_orbax` read, and the
    dtypes that it read, or was told to write. On the host one parameter is in memory at a time,
    and a copy of a tensor of it (measured: 112 to 170 MB for models of 243 and 923 MB, whose
    parameters have up to 17 MB; 318 MB where the embedding has 311 MB).

    Args:
      source: the folder.
      out: what is written.
      overwrite: whether a checkpoint at `out` is replaced, once the new one is complete.
      progress: called as parameters are written.
      shard_bytes: what a safetensors file holds at most.

    Raises:
      CheckpointError: the source cannot be used.
      InputError: `out` is in the way.
      OSError: a file cannot be written.
    """
    from vegas_jax.checkpoint import orbax  # slow to import

    folder = resolve(source)
    if not is_orbax(folder):
        raise CheckpointError(f"checkpoint {folder} is no Orbax folder: it has no {ORBAX_PARAMS}/")
    config = read_config(folder)
    record = orbax.Record.read(folder)
    leaves = hub_plan(config)
    orbax.check_stored(folder, config)

    def dtype_of(path: str) -> np.dtype:
        name = "uint8" if leaves[path].packed else record.other_dtypes.get(path, record.dtype)
        return np.dtype(jnp.dtype(name))

    entries = [
        Entry(name, shape, dtype_of(path))
        for path, leaf in leaves.items()
        for name, shape in leaf.sources.items()
    ]
    sizes = {path: _size(leaf.sources.values()) for path, leaf in leaves.items()}
    tensors = (
        (name, tensor.astype(dtype_of(path), copy=False))
        for path, value in _counted(orbax.read_stored(folder, leaves), sizes, progress)
        for name, tensor in split(path, value, leaves[path].sources, config)
    )
    with replacing(Path(out), folder, overwrite) as target:
        write_tensors(target, entries, tensors, shard_bytes)
        _copy(folder, target)
        shutil.copyfile(folder / CONFIG_FILE, target / CONFIG_FILE)


@contextlib.contextmanager
def replacing(out: Path, source: Path, overwrite: bool) -> Iterator[Path]:
    """A new folder that becomes `out` when all goes well, and vanishes when anything goes wrong.

    Where `out` exists, it is moved away just before, and removed just after.

    Raises:
      InputError: `out` exists and `overwrite` is False, or it is no checkpoint, or it holds the
        source; or there is no folder to put it in.
    """
    out, source = out.resolve(), source.resolve()
    _check_out(out, source, overwrite)
    new, old = (
        out.with_name(f".{out.name}.{word}-{secrets.token_hex(4)}") for word in ("new", "old")
    )
    try:
        new.mkdir()
    except OSError as error:
        raise InputError(f"cannot write to {out.parent}: {error.strerror}") from None
    try:
        yield new
        if not out.exists():
            new.rename(out)
            return
        _check_out(out, source, overwrite)  # it may have come in the meantime
        out.rename(old)
        try:
            new.rename(out)
        except BaseException:
            old.rename(out)
            raise
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        with _no_interrupts():
            _remove(new)
        raise


def _remove(folder: Path) -> None:
    """Until it stays away: what an interrupted Orbax still writes would bring it back."""
    for _ in range(_ATTEMPTS):
        if not folder.exists():
            time.sleep(_PAUSE)
            if not folder.exists():
                return
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(_PAUSE)


@contextlib.contextmanager
def _no_interrupts() -> Iterator[None]:
    """Ctrl-C waits until the folder is gone; only the main thread can say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _check_out(out: Path, source: Path, overwrite: bool) -> None:
    if not out.parent.is_dir():
        raise InputError(f"there is no folder {out.parent} to put {out.name} into")
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise InputError(f"{out} exists already: choose another --out, or give --overwrite")
    if out == source or out in source.parents:
        raise InputError(f"{out} holds what is to be converted, and cannot be overwritten")
    if not (out / CONFIG_FILE).is_file():
        raise InputError(f"{out} is not overwritten, since it is no checkpoint: remove it yourself")


def _stored_as(path: str, stored: np.dtype, dtype: Any) -> str:
    """What a parameter is in a Hugging Face folder."""
    exact = path.endswith(("scale", "sinks"))
    return (stored if exact or dtype is None else jnp.dtype(dtype)).name


def _write_config(fields: Fields, target: Path, dtype: str | None, packed: bool) -> None:
    """config.json as it is, but for what is no longer so."""
    values = dict(fields.values)
    if not packed:
        values.pop("quantization_config", None)
    for key in ("dtype", "torch_dtype"):
        if dtype is not None and key in values:
            values[key] = dtype
    if values == fields.values:
        shutil.copyfile(fields.path, target / CONFIG_FILE)
    else:
        text = json.dumps(values, indent=2, ensure_ascii=False)
        (target / CONFIG_FILE).write_text(f"{text}\n", encoding="utf-8")


def _copy(folder: Path, target: Path) -> None:
    for name in COPIED:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)


def _size(shapes: Any) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _counted(
    leaves: Iterator[tuple[str, np.ndarray]], sizes: dict[str, int], progress: Progress
) -> Iterator[tuple[str, np.ndarray]]:
    done, total = 0, sum(sizes.values())
    for path, value in leaves:
        yield path, value
        done += sizes[path]
        progress(done / total)
