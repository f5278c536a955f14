"""Writing safetensors files tensor by tensor.

The library's own `save_file` wants all tensors of a file in memory; the format (github.com/
huggingface/safetensors, "Format") is a header of names, shapes and places, and then the bytes.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from vegas_jax.checkpoint.tensors import INDEX_FILE, SINGLE_FILE, TYPES, Shape

SHARD_BYTES = 4 * 10**9

_NAMES = {np.dtype(kind): name for name, kind in TYPES.items()}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor that is to be written."""

    name: str
    shape: Shape
    dtype: np.dtype

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    folder: Path,
    entries: Sequence[Entry],
    tensors: Iterable[tuple[str, np.ndarray]],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes model.safetensors, or shards of at most `shard_bytes` and their index.

    Args:
      folder: exists, and has none of these files.
      entries: all tensors, known beforehand.
      tensors: their names and values, in the same order; one at a time is in memory.
      shard_bytes: a larger tensor has a shard of its own.

    Raises:
      OSError: a file cannot be written.
    """
    shards = _shards(entries, shard_bytes)
    count = len(shards)
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    names = [SINGLE_FILE] if count == 1 else names
    values = iter(tensors)
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, shard, values)
    if count > 1:
        pairs = zip(names, shards, strict=True)
        weight_map = {entry.name: name for name, shard in pairs for entry in shard}
        total = sum(entry.size for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _shards(entries: Sequence[Entry], shard_bytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.size > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.size
    return shards


def _write_file(
    path: Path, shard: Sequence[Entry], values: Iterator[tuple[str, np.ndarray]]
) -> None:
    # transformers reads only files that name a framework.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in shard:
        place = [start, start + entry.size]
        kind = _NAMES[entry.dtype]
        header[entry.name] = {"dtype": kind, "shape": entry.shape, "data_offsets": place}
        start += entry.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the bytes of tensors begin at a multiple of eight
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for entry in shard:
            name, value = next(values)
            assert (name, value.shape, value.dtype) == (entry.name, entry.shape, entry.dtype)
            file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
