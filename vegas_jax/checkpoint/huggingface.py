"""Hugging Face safetensors folders: where they lie, and their weights as the model's parameters.

Tensors are read one at a time and copied straight into the parameter that holds them, so that the
host never has a second copy of the model.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vegas_jax.checkpoint.hf_config import CONFIG_FILE
from vegas_jax.checkpoint.layout import EMBEDDING, HEAD, plan
from vegas_jax.checkpoint.tensors import FLOATS, TYPES, Shape, Tensor, listed, open_tensors
from vegas_jax.errors import CheckpointError, check, shorten
from vegas_jax.model.config import ModelConfig

Params = dict[str, Any]
Place = Callable[[str, np.ndarray], jax.Array]

ASSETS = Path(__file__).parents[1] / "assets"
SHIPPED = ("codelm-16m",)
ORBAX_PARAMS = "params"  # the folder that makes a checkpoint one of Orbax
GGUF_SUFFIX = ".gguf"

_LONGEST_NAME = 83  # characters, in a sentence
_PARAM_DTYPES = ("bfloat16", "float16", "float32")


def resolve(path_or_name: str | Path) -> Path:
    """Where a checkpoint lies: an existing folder or GGUF file, or the name of a shipped one.

    A folder goes before a shipped checkpoint of the same name.

    Raises:
      CheckpointError: it is none of these, or the folder lacks config.json or weights.
    """
    path = Path(path_or_name)
    try:
        path.exists()
    except OSError as error:
        shown = shorten(str(path_or_name), _LONGEST_NAME)
        raise CheckpointError(
            f"checkpoint {shown!r} cannot be looked for: {error.strerror}"
        ) from None
    if not path.exists() and str(path_or_name) in SHIPPED:
        path = ASSETS / str(path_or_name)
    if not path.exists():
        problem = "does not exist"
    elif path.is_file() and path.suffix == GGUF_SUFFIX:
        return path
    elif not path.is_dir():
        problem = "is not a folder"
    elif not (path / CONFIG_FILE).is_file():
        problem = f"has no {CONFIG_FILE}"
    elif not any(path.glob("*.safetensors")) and not is_orbax(path):
        problem = f"has no *.safetensors and no {ORBAX_PARAMS}/"
    else:
        return path
    raise CheckpointError(
        f"checkpoint {str(path_or_name)!r} {problem}, but must be a folder with {CONFIG_FILE} and "
        f"*.safetensors or {ORBAX_PARAMS}/, a *{GGUF_SUFFIX} file, or a shipped name: "
        f"{', '.join(SHIPPED)}"
    )


def is_orbax(folder: Path) -> bool:
    """Whether the weights are Orbax's; safetensors go before them."""
    return (folder / ORBAX_PARAMS).is_dir() and not any(folder.glob("*.safetensors"))


def read_params(
    folder: Path,
    config: ModelConfig,
    dtype: Any,
    fp8_block: Shape | None = None,
    place: Place | None = None,
) -> Params:
    """Reads the weights in `folder` as the model's parameters.

    Matrices and biases are in `dtype`, norm scales and sinks in float32;
    `vegas_jax.checkpoint.layout` has the tree. A tied checkpoint may also store lm_head.weight if
    it equals the embedding.

    Args:
      folder: what `resolve` gave; `model.safetensors`, or shards with or without an index.
      config: what `read_config` gave.
      dtype: bfloat16, float16 or float32.
      fp8_block: what `read_fp8_block` gave.
      place: puts a parameter, given its path, where it belongs (`vegas_jax.sharding.placer`); by
        default on the default device.

    Raises:
      CheckpointError: unreadable or missing files; tensors that are missing, unexpected, of another
        shape or dtype, all listed by name; values that float16 cannot hold.
      InputError: another `dtype`.
    """
    folder = Path(folder)
    with contextlib.ExitStack() as files:
        tensors = open_tensors(folder, files, fp8_block)
        return build_params(tensors, config, dtype, folder, place)


def build_params(
    tensors: dict[str, Tensor],
    config: ModelConfig,
    dtype: Any,
    source: Path,
    place: Place | None = None,
) -> Params:
    """The parameters that a checkpoint's tensors make up; `source` names it in errors."""
    params: Params = {}
    for path, value in read_leaves(tensors, config, jnp.dtype(dtype), source):
        insert(params, path, jax.device_put(value) if place is None else place(path, value))
    return params


def read_leaves(
    tensors: dict[str, Tensor], config: ModelConfig, dtype: Any, source: Path
) -> Iterator[tuple[str, np.ndarray]]:
    """Each parameter's path and value, one at a time, on the host.

    The iterator keeps none of them: what is in memory is the parameter, and the tensor that is
    being copied into it.

    Args:
      tensors: what `open_tensors` gave; their files stay open meanwhile.
      config: what `read_config` gave.
      dtype: of matrices and biases; None leaves each in what `stored_dtype` says.
      source: names the checkpoint in errors.

    Raises:
      CheckpointError: at once, tensors that do not fit the config, as in `read_params`; later,
        what goes wrong as one is read.
      InputError: another `dtype` than bfloat16, float16 and float32.
    """
    if dtype is not None:
        dtype = jnp.dtype(dtype)
        allowed = f"one of {', '.join(_PARAM_DTYPES)}"
        check(dtype.name in _PARAM_DTYPES, "dtype", dtype.name, allowed)
    _check_tensors(tensors, config, source)
    return _leaves(tensors, config, dtype)


def _leaves(
    tensors: dict[str, Tensor], config: ModelConfig, dtype: Any
) -> Iterator[tuple[str, np.ndarray]]:
    for path, leaf in plan(config, tensors).items():
        parts = [tensors[name] for name in leaf.sources]
        yield path, leaf.build(parts, stored_dtype(parts) if dtype is None else dtype)


def stored_dtype(tensors: Sequence[Tensor]) -> np.dtype:
    """The dtype that these tensors are stored in: float32 if they differ, bfloat16 for FP8.

    bfloat16 also for MXFP4, whose values it holds exactly.
    """
    kinds = {tensor.dtype if tensor.dtype in FLOATS else "BF16" for tensor in tensors}
    return np.dtype(TYPES[kinds.pop()] if len(kinds) == 1 else np.float32)


def _check_tensors(tensors: dict[str, Tensor], config: ModelConfig, source: Path) -> None:
    """Compares what is stored with what the config calls for, and lists every difference."""
    leaves = plan(config, tensors).values()
    required = {name: shape for leaf in leaves for name, shape in leaf.sources.items()}
    packed = {name for leaf in leaves if leaf.packed for name in leaf.sources}
    known = {**required, HEAD: required[EMBEDDING]}
    # What stands before the names in this checkpoint.
    prefix = tensors[EMBEDDING].name.removesuffix(EMBEDDING) if EMBEDDING in tensors else "model."
    found = [(name, tensor, known[name]) for name, tensor in tensors.items() if name in known]
    differences = {
        "missing": [
            name if name == HEAD else prefix + name for name in required if name not in tensors
        ],
        "unexpected": [tensor.name for name, tensor in tensors.items() if name not in known],
        "of another shape": [
            f"{tensor.name} {list(tensor.shape)} instead of {list(shape)}"
            for _, tensor, shape in found
            if tensor.shape != shape
        ],
        f"not of dtype {', '.join(FLOATS)}": [
            f"{tensor.name} {tensor.dtype}"
            for name, tensor, _ in found
            if name not in packed and not tensor.is_float
        ],
        "not of dtype U8": [
            f"{tensor.name} {tensor.dtype}"
            for name, tensor, _ in found
            if name in packed and tensor.dtype != "U8"
        ],
    }
    lists = [f"{kind}: {listed(names)}" for kind, names in differences.items() if names]
    if lists:
        raise CheckpointError(
            f"checkpoint {source} does not fit its {CONFIG_FILE}, tensors {'; '.join(lists)}"
        )
    if config.tie_word_embeddings and HEAD in tensors:
        _check_tied(tensors, source)


def _check_tied(tensors: dict[str, Tensor], source: Path) -> None:
    if not np.array_equal(tensors[HEAD].read(), tensors[EMBEDDING].read()):
        raise CheckpointError(
            f"checkpoint {source} has tie_word_embeddings true, but its {HEAD} differs from "
            f"{tensors[EMBEDDING].name}"
        )


def insert(params: Params, path: str, leaf: Any) -> None:
    """Puts a leaf where its path, a/b/c, says."""
    *parents, last = path.split("/")
    for parent in parents:
        params = params.setdefault(parent, {})
    params[last] = leaf
