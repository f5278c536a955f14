"""Hugging Face safetensors folders: where they lie, and their weights as the model's parameters.

Tensors are read one at a time and copied straight into the parameter that holds them, so that the
host never has a second copy of the model.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vegas_jax.checkpoint.hf_config import CONFIG_FILE
from vegas_jax.checkpoint.layout import EMBEDDING, HEAD, plan
from vegas_jax.checkpoint.tensors import FLOATS, Shape, Tensor, listed, open_tensors
from vegas_jax.errors import CheckpointError, check
from vegas_jax.model.config import ModelConfig

Params = dict[str, Any]
Place = Callable[[str, np.ndarray], jax.Array]

ASSETS = Path(__file__).parents[1] / "assets"
SHIPPED = ("codelm-16m",)

_PARAM_DTYPES = ("bfloat16", "float16", "float32")


def resolve(path_or_name: str | Path) -> Path:
    """The folder of a checkpoint: an existing folder, or the name of one that is shipped.

    A folder goes before a shipped checkpoint of the same name.

    Raises:
      CheckpointError: it is neither, or the folder lacks config.json or *.safetensors.
    """
    folder = Path(path_or_name)
    if not folder.exists() and str(path_or_name) in SHIPPED:
        folder = ASSETS / str(path_or_name)
    if not folder.exists():
        problem = "does not exist"
    elif not folder.is_dir():
        problem = "is not a folder"
    elif not (folder / CONFIG_FILE).is_file():
        problem = f"has no {CONFIG_FILE}"
    elif not any(folder.glob("*.safetensors")):
        problem = "has no *.safetensors"
    else:
        return folder
    raise CheckpointError(
        f"checkpoint {str(path_or_name)!r} {problem}, but must be a folder with {CONFIG_FILE} and "
        f"*.safetensors, or a shipped name: {', '.join(SHIPPED)}"
    )


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
    dtype = jnp.dtype(dtype)
    check(dtype.name in _PARAM_DTYPES, "dtype", dtype.name, f"one of {', '.join(_PARAM_DTYPES)}")
    _check_tensors(tensors, config, source)
    params: Params = {}
    for path, leaf in plan(config, tensors).items():
        value = leaf.build([tensors[name] for name in leaf.sources], dtype)
        _insert(params, path, jax.device_put(value) if place is None else place(path, value))
    return params


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
            if name not in packed and tensor.dtype not in FLOATS
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


def _insert(params: Params, path: str, leaf: jax.Array) -> None:
    *parents, last = path.split("/")
    for parent in parents:
        params = params.setdefault(parent, {})
    params[last] = leaf
