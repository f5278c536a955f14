"""Orbax folders: a checkpoint whose weights are the model's own parameters.

    config.json, generation_config.json, tokenizer.json, ...   as in a Hugging Face folder
    params/       the tree of `vegas_jax.checkpoint.layout`, one Orbax checkpoint (OCDBT, zarr 3)
    orbax.json    what the tree does not tell: `Record`

Importing this module imports Orbax, which takes most of a second: import it where it is needed.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from pallas_kernels.grouped.mxfp4 import MXFP4, dequantize
from vegas_jax.checkpoint.huggingface import ORBAX_PARAMS, Params, insert
from vegas_jax.checkpoint.json_fields import Fields
from vegas_jax.checkpoint.tensors import listed
from vegas_jax.errors import CheckpointError, InputError
from vegas_jax.model.config import ModelConfig
from vegas_jax.model.transformer import Transformer
from vegas_jax.sharding import param_shapes

RECORD_FILE = "orbax.json"
FORMAT = 1

# What is read or written at a time: a device that restores its part of a parameter reads the
# chunks that its part touches, whole.
_CHUNK_BYTES = 16 * 2**20
_LARGEST_FACTOR = 64
_GB = 10**9
_LONGEST_REASON = 300


@dataclasses.dataclass(frozen=True)
class Record:
    """orbax.json.

    Attributes:
      dtype: of the embedding, and in a Hugging Face folder of all parameters but
      other_dtypes: by path. Norm scales are float32 in the tree whatever they were stored in.
    """

    dtype: str
    other_dtypes: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Writes the file."""
        text = json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=2)
        (folder / RECORD_FILE).write_text(f"{text}\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Record":
        """Raises CheckpointError for a missing or malformed file, or one of another format."""
        fields = Fields.read(folder / RECORD_FILE)
        if fields.integer("format") != FORMAT:
            raise fields.wrong("format", f"{FORMAT}, the only one that this version reads")
        dtypes = ("bfloat16", "float16", "float32")
        others = fields.objects("other_dtypes")
        for part, key in [(fields, "dtype"), *((others, path) for path in others.values)]:
            if part.get(key) not in dtypes:
                raise part.wrong(key, f"one of {', '.join(dtypes)}")
        return cls(fields.get("dtype"), others.values)


class _Pending:
    """Stands in a tree for a parameter that has not been read."""

    def __init__(self, path: str) -> None:
        self.path = path


class _Writer(ocp.type_handlers.NumpyHandler):
    """Writes parameters as they come, each before the next is read.

    Orbax would have the whole tree in memory, and a copy of it. They are marked as numpy arrays.
    """

    def __init__(self, leaves: Iterable[tuple[str, np.ndarray]]) -> None:
        super().__init__()
        self._leaves = leaves

    def memory_size(self, values: Sequence[_Pending]) -> Sequence[tuple[int, int]]:
        """For Orbax's log only."""
        return [(0, 0)] * len(values)

    async def serialize(
        self, values: Sequence[_Pending], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """Reads and writes all of them."""
        places = {value.path: info for value, info in zip(values, infos, strict=True)}
        for path, array in self._leaves:
            chunks = ocp.SaveArgs(chunk_byte_size=_chunk_bytes(array.shape, array.itemsize))
            for future in await super().serialize([array], [places.pop(path)], [chunks]):
                _finish(future)
            await asyncio.sleep(0)  # where Ctrl-C arrives
        assert not places, f"never read: {', '.join(places)}"
        return []


def _chunk_bytes(shape: Sequence[int], itemsize: int) -> int | None:
    """_CHUNK_BYTES, or None, a single chunk, where that would make far too small ones.

    Orbax replaces the size of the largest axis by its next smaller divisor until a chunk is small
    enough, and so takes a vocabulary that is a prime number apart row by row.
    """
    sizes = list(shape)
    while math.prod(sizes) * itemsize > _CHUNK_BYTES:
        axis = sizes.index(max(sizes))
        smaller = range(sizes[axis] - 1, 0, -1)
        size = next((n for n in smaller if shape[axis] % n == 0), 1)
        if sizes[axis] > _LARGEST_FACTOR * size:
            return None
        sizes[axis] = size
    return _CHUNK_BYTES


def _finish(future: Any) -> None:
    """Waits for it, after Ctrl-C too: else it would write into a folder that is being removed.

    The wait goes through another thread, since `Thread.join`, which Orbax calls, takes a thread for
    finished when Ctrl-C interrupts it.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(future.result).result()


def save_params(
    folder: Path, leaves: Iterable[tuple[str, np.ndarray]], paths: Collection[str]
) -> None:
    """Writes `folder`/params, which exists only once it is complete.

    On the host this takes about three times the memory of the largest parameter, whatever the size
    of the model: the one that is being read, the copy of it that Orbax makes, and what is on its
    way to the disk. Measured on two CPU cores, beyond what the process had before: 82 to 108 MB
    for a model of 243 MB and 136 MB for one of 923 MB, whose parameters have up to 17 MB; 832 MB
    for one of 387 MB whose embedding has 311 MB. Pages of the safetensors files that are mapped
    meanwhile come on top, but the system takes those back when it needs them.

    Args:
      folder: exists, and has no params.
      leaves: what `read_leaves` gave, or any paths with arrays.
      paths: all paths, known beforehand.

    Raises:
      CheckpointError: what `leaves` raises, or that `folder` cannot be written to.
    """
    tree: Params = {}
    for path in paths:
        insert(tree, path, _Pending(path))
    # The second entry only keeps Orbax from warning that there is none.
    registry = ocp.type_handlers.create_type_handler_registry(
        (_Pending, _Writer(leaves)), (jax.Array, ocp.type_handlers.ArrayHandler())
    )
    handler = ocp.PyTreeCheckpointHandler(use_zarr3=True, type_handler_registry=registry)
    target = folder.resolve() / ORBAX_PARAMS
    with _errors(f"{target} cannot be written"), ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(target, args=ocp.args.PyTreeSave(tree))


def restore_params(folder: Path, config: ModelConfig, dtype: Any, shardings: Any = None) -> Params:
    """Reads the weights in `folder`/params as the model's parameters.

    Matrices and biases are in `dtype`, norm scales and sinks in float32, as in
    `vegas_jax.checkpoint.read_params`; `vegas_jax.checkpoint.layout` has the tree. Where the
    stored dtype is another one, they are cast as they are read.

    Each device reads its part of a parameter; about two gigabytes of parts, or one if it is larger,
    are on the host at a time.

    Args:
      folder: of the checkpoint.
      config: what `read_config` gave.
      dtype: bfloat16, float16 or float32.
      shardings: None is the default device; or a tree of `jax.sharding.Sharding` like the
        parameters'.

    Raises:
      CheckpointError: files that are missing, unreadable or of another format; parameters that are
        missing, unexpected or of another shape, all listed; values that float16 cannot hold.
      InputError: shardings that are no such tree, or given for MXFP4 experts that are to be
        dequantised.
    """
    folder = Path(folder).resolve()
    Record.read(folder)
    stored = _stored_shapes(folder)
    unpacked = _packed_config(config) if any(path.endswith("_blocks") for path in stored) else None
    expected = abstract_params(config if unpacked is None else unpacked, jnp.dtype(dtype))
    _compare(folder, expected, stored)
    if shardings is None:
        default = jnp.zeros(()).sharding
        shardings = jax.tree.map(lambda _: default, expected)
    elif unpacked is not None:
        raise InputError(
            "experts stored as MXFP4 cannot be dequantised onto a mesh or other shardings: convert "
            "the checkpoint with --dequantize first"
        )
    elif _flat(shardings).keys() != _flat(expected).keys():
        raise InputError("shardings must be a tree of shardings like the parameters'")
    args = ocp.checkpoint_utils.construct_restore_args(expected, shardings)
    with _errors(f"{folder / ORBAX_PARAMS} cannot be restored, it may be incomplete"):
        params = _restore(folder, expected, args)
    if unpacked is not None:
        _dequantize(params, jnp.dtype(dtype))
    if jnp.dtype(dtype) == jnp.float16:
        _check_finite(folder, params)
    return params


def read_stored(folder: Path, paths: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Each parameter's path and stored value, one at a time, on the host.

    Raises:
      CheckpointError: one is missing or cannot be read.
    """
    folder = Path(folder).resolve()
    for path in paths:
        item: Params = {}
        args: Params = {}
        insert(item, path, 0)
        insert(args, path, ocp.RestoreArgs(restore_type=np.ndarray))
        with _errors(f"{folder / ORBAX_PARAMS} cannot be restored, it may be incomplete"):
            (leaf,) = jax.tree.leaves(_restore(folder, item, args, partial_restore=True))
        yield path, leaf


def check_stored(folder: Path, config: ModelConfig) -> None:
    """Raises CheckpointError unless `folder`/params has the config's parameters."""
    folder = Path(folder).resolve()
    _compare(folder, abstract_params(config, jnp.float32), _stored_shapes(folder))


def abstract_params(config: ModelConfig, dtype: Any) -> Params:
    """Shapes and dtypes of the model's parameters, a tree of `jax.ShapeDtypeStruct`."""
    # Only shapes and dtypes are computed: whether JAX is strict does not matter.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return param_shapes(Transformer(config, jnp.dtype(dtype), "reference"))


def _restore(folder: Path, item: Any, args: Any, **options: Any) -> Params:
    largest = max(math.prod(getattr(leaf, "shape", ())) for leaf in jax.tree.leaves(item))
    # Orbax refuses a read that is larger than the limit; eight bytes allow for both dtypes.
    limit = 2 + math.ceil(8 * largest / _GB)
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=limit)
    with ocp.Checkpointer(handler) as checkpointer:
        restore = ocp.args.PyTreeRestore(item, args, **options)
        params: Params = checkpointer.restore(folder / ORBAX_PARAMS, args=restore)
    return params


def _stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    target = folder / ORBAX_PARAMS
    with _errors(f"{target} cannot be read as an Orbax checkpoint, it may be incomplete"):
        metadata = ocp.PyTreeCheckpointHandler().metadata(target)
        tree = getattr(metadata, "tree", metadata)
        return {path: tuple(leaf.shape) for path, leaf in _flat(tree).items()}


def _flat(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(str(key.key) for key in path): leaf for path, leaf in leaves}


def _compare(folder: Path, model: Params, stored: Mapping[str, Any]) -> None:
    expected = {path: leaf.shape for path, leaf in _flat(model).items()}
    differences = {
        "missing": [path for path in expected if path not in stored],
        "unexpected": [path for path in stored if path not in expected],
        "of another shape": [
            f"{path} {list(stored[path])} instead of {list(shape)}"
            for path, shape in expected.items()
            if path in stored and stored[path] != shape
        ],
    }
    lists = [f"{kind}: {listed(names)}" for kind, names in differences.items() if names]
    if lists:
        raise CheckpointError(
            f"checkpoint {folder} does not fit its config.json, parameters {'; '.join(lists)}"
        )


def _packed_config(config: ModelConfig) -> ModelConfig | None:
    """The config of experts that are stored as MXFP4, though `config` wants them dequantised."""
    if config.moe is None or config.moe.packed:
        return None
    return dataclasses.replace(config, moe=dataclasses.replace(config.moe, packed=True))


def _dequantize(params: Params, dtype: Any) -> None:
    convert = jax.jit(functools.partial(dequantize, dtype=dtype))
    for layer in params.values():
        mlp = layer.get("mlp", {}) if isinstance(layer, dict) else {}
        for name in [key.removesuffix("_blocks") for key in mlp if key.endswith("_blocks")]:
            mlp[name] = convert(MXFP4(mlp.pop(f"{name}_blocks"), mlp.pop(f"{name}_scales")))


def _check_finite(folder: Path, params: Params) -> None:
    infinite = jax.jit(lambda leaf: jnp.isinf(leaf).any())
    for path, leaf in _flat(params).items():
        if leaf.dtype == jnp.float16 and infinite(leaf):
            raise CheckpointError(
                f"checkpoint {folder}: {path} has a value beyond float16's 65504; "
                "load it in bfloat16 or float32"
            )


@contextlib.contextmanager
def _errors(sentence: str) -> Iterator[None]:
    """Says in one sentence what goes wrong in Orbax, which raises whatever it meets.

    What it would log meanwhile is for its own developers.
    """
    verbosity, hook = logging.get_verbosity(), sys.unraisablehook
    logging.set_verbosity(logging.FATAL)
    if getattr(hook, "func", None) is not _print_unless_late:
        sys.unraisablehook = functools.partial(_print_unless_late, hook)
    try:
        yield
        sys.unraisablehook = hook
    except (CheckpointError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        raise CheckpointError(f"{sentence}: {_reason(error)}") from error
    finally:
        logging.set_verbosity(verbosity)


def _reason(error: BaseException) -> str:
    """What the operating system said, where it is to blame, else how the first error begins."""
    while error.__cause__ is not None:
        error = error.__cause__
    code = re.search(r"os_error_code='(\d+)'", str(error))
    if code is not None:
        return os.strerror(int(code[1]))
    if isinstance(error, KeyError | AttributeError | TypeError):
        return "its metadata are malformed"
    first = (str(error).splitlines() or [repr(error)])[0]
    # TensorStore goes on with all of its settings.
    return re.sub(r"\s*\[(tensorstore_spec|source locations)=.*", "", first)[:_LONGEST_REASON]


def _print_unless_late(hook: Any, unraisable: Any) -> None:
    """After an error, reads that Orbax did not wait for come back to an event loop that it closed.

    Or they are thrown away. Python would print each of them, so this hook stays in place after an
    error.
    """
    late = "Event loop is closed" in str(unraisable.exc_value)
    code = getattr(unraisable.object, "cr_code", None)  # of a coroutine
    if not late and (code is None or "orbax" not in code.co_filename):
        hook(unraisable)
