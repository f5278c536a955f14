"""The tensors of a Hugging Face folder's safetensors files, opened but not read.

A tensor is anything that has a `Tensor`'s attributes: those of FP8 checkpoints are dequantised as
they are read.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from vegas_jax.errors import CheckpointError

Shape = tuple[int, ...]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOATS, FP8 = ("BF16", "F16", "F32"), "F8_E4M3"
TYPES = {  # of numpy, by safetensors' names
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    FP8: ml_dtypes.float8_e4m3fn,
    "U8": np.uint8,
}

# What may stand before the names of a language model's tensors, in the order in which it is tried.
_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
_SCALE = "_scale_inv"
_MAX_LISTED = 10


class Tensor(Protocol):
    """A tensor of a checkpoint."""

    @property
    def name(self) -> str:
        """As it is stored."""

    @property
    def shape(self) -> Shape:
        """As the model's layout has it."""

    @property
    def dtype(self) -> str:
        """As it is stored."""

    @property
    def is_float(self) -> bool:
        """Whether `read` gives floats of 16 or 32 bits."""

    def read(self) -> np.ndarray:
        """The values."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in an open safetensors file."""

    name: str
    file: Any
    path: Path

    @property
    def shape(self) -> Shape:
        """As stored."""
        return tuple(self.file.get_slice(self.name).get_shape())

    @property
    def dtype(self) -> str:
        """As stored."""
        return str(self.file.get_slice(self.name).get_dtype())

    @property
    def is_float(self) -> bool:
        """Whether the values need no factors."""
        return self.dtype in FLOATS

    def read(self) -> np.ndarray:
        """All values.

        Not through safetensors, which maps the file into memory, where all that has been read would
        stay, and which gives numpy no FP8; the file's header says where the bytes are.
        """
        with named_errors(self.path):
            data, header = _header(self.path, self.path.stat().st_mtime_ns)
            start, end = header[self.name]["data_offsets"]
            values = np.fromfile(self.path, np.uint8, end - start, offset=data + start)
        return values.view(TYPES[self.dtype]).reshape(self.shape)


# A file of experts has thousands of tensors, which would each read it again.
@functools.lru_cache(maxsize=4)
def _header(path: Path, changed: int) -> tuple[int, dict[str, Any]]:
    """Where the bytes of tensors begin, and what a safetensors file says of each."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return 8 + size, json.loads(file.read(size))


@dataclasses.dataclass(frozen=True)
class BlockScaledTensor:
    """An FP8 matrix with a factor for each block (model card: Qwen/Qwen3-8B-FP8)."""

    values: StoredTensor
    factors: StoredTensor
    block: Shape

    @property
    def name(self) -> str:
        """Of the matrix."""
        return self.values.name

    @property
    def shape(self) -> Shape:
        """Of the matrix."""
        return self.values.shape

    @property
    def dtype(self) -> str:
        """Of the matrix."""
        return self.values.dtype

    @property
    def is_float(self) -> bool:
        """The product is."""
        return True

    def read(self) -> np.ndarray:
        """The product of values and factors, float32."""
        factors = self.factors.read().astype(np.float32)
        needed = tuple(-(-n // block) for n, block in zip(self.shape, self.block, strict=True))
        if factors.shape != needed:
            raise CheckpointError(
                f"{self.values.path}: {self.factors.name} is {list(factors.shape)}, but must be "
                f"{list(needed)}, one factor for each block of {list(self.block)}"
            )
        for axis, size in enumerate(self.block):
            factors = factors.repeat(size, axis)
        rows, columns = self.shape
        return self.values.read().astype(np.float32) * factors[:rows, :columns]


def open_tensors(
    folder: Path, files: contextlib.ExitStack, block: Shape | None
) -> dict[str, Tensor]:
    """All tensors in the folder, by their name without `model.` or another such prefix.

    Args:
      folder: with *.safetensors.
      files: closes the files.
      block: rows and columns that share a factor, in FP8 checkpoints.

    Raises:
      CheckpointError: a file is missing or unreadable, or holds a tensor that another has.
    """
    stored: dict[str, StoredTensor] = {}
    for path in _paths(folder):
        with named_errors(path):
            file = files.enter_context(safe_open(path, framework="numpy"))
        for name in file.keys():  # noqa: SIM118  a safe_open handle is no mapping
            if name in stored:
                raise _twice(folder, stored[name], StoredTensor(name, file, path))
            stored[name] = StoredTensor(name, file, path)
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith("rotary_emb.inv_freq"):
            continue
        if block is not None and name.endswith(_SCALE):
            matrix = stored.get(name.removesuffix(_SCALE))
            if matrix is not None and _is_fp8_matrix(matrix):
                continue
        short = _without_prefix(name)
        if short in tensors:
            raise _twice(folder, stored[tensors[short].name], tensor)
        if block is not None and name + _SCALE in stored and _is_fp8_matrix(tensor):
            tensors[short] = BlockScaledTensor(tensor, stored[name + _SCALE], block)
        else:
            tensors[short] = tensor
    return tensors


def _is_fp8_matrix(tensor: StoredTensor) -> bool:
    return tensor.dtype == FP8 and len(tensor.shape) == 2


def _without_prefix(name: str) -> str:
    return name.removeprefix(next(p for p in _PREFIXES if name.startswith(p)))


def _twice(folder: Path, first: StoredTensor, second: StoredTensor) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {folder} stores a tensor twice: {first.name} in {first.path.name} and "
        f"{second.name} in {second.path.name}"
    )


def _paths(folder: Path) -> list[Path]:
    """`model.safetensors` if there is one, else the shards of the index, else every safetensors."""
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    if not (folder / INDEX_FILE).exists():
        return sorted(folder.glob("*.safetensors"))
    names = _shard_names(folder / INDEX_FILE)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"checkpoint {folder} lacks files that its {INDEX_FILE} names: {listed(missing)}"
        )
    return [folder / name for name in names]


def _shard_names(index: Path) -> list[str]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return sorted({Path(name).name for name in names})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} must be a JSON object whose weight_map gives each tensor's file, but reading "
            f"it failed: {error!r}"
        ) from error


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """What goes wrong with a file names it."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors, it may be truncated: {error}"
        ) from error


def listed(names: list[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
