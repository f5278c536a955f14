"""Hugging Face safetensors folders of Qwen3 dense models: where they lie, and their weights.

Tensors are read one at a time and copied straight into the leaf that holds them, so that the host
never has a second copy of the model. Stored matrices are (out, in); leaves are (in, out), used as
x @ W, with q, k and v side by side in one leaf and gate and up in another.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  registers bfloat16 with numpy, which safetensors needs
import numpy as np
from safetensors import SafetensorError, safe_open

from vegas_jax.checkpoint.hf_config import CONFIG_FILE
from vegas_jax.config import ModelConfig
from vegas_jax.errors import CheckpointError, check

Params = dict[str, Any]
Shape = tuple[int, ...]

ASSETS = Path(__file__).parents[1] / "assets"
SHIPPED = ("codelm-16m",)
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_PREFIX = "model."
_EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head.weight"
_STORED_DTYPES = ("BF16", "F16", "F32")
_PARAM_DTYPES = ("bfloat16", "float16", "float32")
_MAX_LISTED = 10


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


def read_params(folder: Path, config: ModelConfig, dtype: Any) -> Params:
    """Reads the weights in `folder` as the model's parameters, on the default device.

    The tree, with matrices in `dtype` and scales in float32 (V vocabulary, E hidden size, F
    intermediate size, H query heads, K KV heads, D head_dim; names as in Qwen/Qwen3-8B):

        embed [V, E]
        layers_{i}/input_norm/scale [E]
        layers_{i}/attn/qkv [E, (H + 2 K) D]    all q heads, then k, then v
        layers_{i}/attn/{q_norm,k_norm}/scale [D]
        layers_{i}/attn/o [H D, E]
        layers_{i}/post_norm/scale [E]
        layers_{i}/mlp/gate_up [E, 2 F]         gate, then up
        layers_{i}/mlp/down [F, E]
        final_norm/scale [E]
        head [E, V]                             only when the embedding is not tied

    A tied checkpoint may also store lm_head.weight if it equals the embedding.

    Args:
      folder: what `resolve` gave; `model.safetensors`, or shards with or without an index.
      config: what `read_config` gave.
      dtype: bfloat16, float16 or float32.

    Raises:
      CheckpointError: unreadable or missing files; tensors that are missing, unexpected, of another
        shape or dtype, all listed by name; values that float16 cannot hold.
      InputError: another `dtype`.
    """
    dtype = jnp.dtype(dtype)
    check(dtype.name in _PARAM_DTYPES, "dtype", dtype.name, f"one of {', '.join(_PARAM_DTYPES)}")
    params: Params = {}
    with contextlib.ExitStack() as files:
        tensors = _open_tensors(Path(folder), files)
        _check_tensors(tensors, config, folder)
        for path, sources in _plan(config).items():
            leaf = _read_leaf(path, [tensors[name] for name in sources], dtype)
            _insert(params, path, jax.device_put(leaf))
    return params


def _plan(config: ModelConfig) -> dict[str, dict[str, Shape]]:
    """Every leaf's path, with the tensors that make it up, unprefixed, and their stored shapes."""
    embed, vocab = config.hidden_size, config.vocab_size
    plan: dict[str, dict[str, Shape]] = {"embed": {_EMBEDDING: (vocab, embed)}}
    for i in range(config.num_layers):
        for path, sources in _layer_plan(config).items():
            plan[f"layers_{i}/{path}"] = {
                f"layers.{i}.{name}.weight": shape for name, shape in sources.items()
            }
    plan["final_norm/scale"] = {"norm.weight": (embed,)}
    if not config.tie_word_embeddings:
        plan["head"] = {_HEAD: (vocab, embed)}
    return plan


def _layer_plan(config: ModelConfig) -> dict[str, dict[str, Shape]]:
    embed, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * head, config.num_kv_heads * head
    return {
        "input_norm/scale": {"input_layernorm": (embed,)},
        "attn/qkv": {
            "self_attn.q_proj": (queries, embed),
            "self_attn.k_proj": (keys, embed),
            "self_attn.v_proj": (keys, embed),
        },
        "attn/q_norm/scale": {"self_attn.q_norm": (head,)},
        "attn/k_norm/scale": {"self_attn.k_norm": (head,)},
        "attn/o": {"self_attn.o_proj": (embed, queries)},
        "post_norm/scale": {"post_attention_layernorm": (embed,)},
        "mlp/gate_up": {"mlp.gate_proj": (inner, embed), "mlp.up_proj": (inner, embed)},
        "mlp/down": {"mlp.down_proj": (embed, inner)},
    }


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor in an open safetensors file; `name` is as it is stored there."""

    name: str
    file: Any
    path: Path

    @property
    def shape(self) -> Shape:
        return tuple(self.file.get_slice(self.name).get_shape())

    @property
    def dtype(self) -> str:
        return self.file.get_slice(self.name).get_dtype()

    def read(self) -> np.ndarray:
        with _named_errors(self.path):
            return self.file.get_tensor(self.name)


def _open_tensors(folder: Path, files: contextlib.ExitStack) -> dict[str, _Tensor]:
    """All tensors in the folder, by their name without the `model.` prefix; nothing is read yet."""
    tensors: dict[str, _Tensor] = {}
    for path in _files(folder):
        with _named_errors(path):
            file = files.enter_context(safe_open(path, framework="numpy"))
        for stored in file.keys():  # noqa: SIM118  a safe_open handle is no mapping
            name = stored.removeprefix(_PREFIX)
            if name.endswith("rotary_emb.inv_freq"):
                continue
            if name in tensors:
                raise CheckpointError(
                    f"checkpoint {folder} stores a tensor twice: {tensors[name].name} in "
                    f"{tensors[name].path.name} and {stored} in {path.name}"
                )
            tensors[name] = _Tensor(stored, file, path)
    return tensors


def _files(folder: Path) -> list[Path]:
    """`model.safetensors` if there is one, else the shards of the index, else every safetensors."""
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    if not (folder / INDEX_FILE).exists():
        return sorted(folder.glob("*.safetensors"))
    names = _shard_names(folder / INDEX_FILE)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"checkpoint {folder} lacks files that its {INDEX_FILE} names: {_listed(missing)}"
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
def _named_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors, it may be truncated: {error}"
        ) from error


def _check_tensors(tensors: dict[str, _Tensor], config: ModelConfig, folder: Path) -> None:
    """Compares what is stored with what the config calls for, and lists every difference."""
    required = {name: shape for leaf in _plan(config).values() for name, shape in leaf.items()}
    known = {**required, _HEAD: required[_EMBEDDING]}
    prefix = "" if _EMBEDDING in {tensor.name for tensor in tensors.values()} else _PREFIX
    found = [(tensor, known[name]) for name, tensor in tensors.items() if name in known]
    differences = {
        "missing": [
            name if name == _HEAD else prefix + name for name in required if name not in tensors
        ],
        "unexpected": [tensor.name for name, tensor in tensors.items() if name not in known],
        "of another shape": [
            f"{tensor.name} {list(tensor.shape)} instead of {list(shape)}"
            for tensor, shape in found
            if tensor.shape != shape
        ],
        f"not of dtype {', '.join(_STORED_DTYPES)}": [
            f"{tensor.name} {tensor.dtype}"
            for tensor, _ in found
            if tensor.dtype not in _STORED_DTYPES
        ],
    }
    listed = [f"{kind}: {_listed(names)}" for kind, names in differences.items() if names]
    if listed:
        raise CheckpointError(
            f"checkpoint {folder} does not fit its {CONFIG_FILE}, tensors {'; '.join(listed)}"
        )
    if config.tie_word_embeddings and _HEAD in tensors:
        _check_tied(tensors, folder)


def _check_tied(tensors: dict[str, _Tensor], folder: Path) -> None:
    if not np.array_equal(tensors[_HEAD].read(), tensors[_EMBEDDING].read()):
        raise CheckpointError(
            f"checkpoint {folder} has tie_word_embeddings true, but its {_HEAD} differs from "
            f"{tensors[_EMBEDDING].name}"
        )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def _read_leaf(path: str, tensors: Sequence[_Tensor], dtype: np.dtype) -> np.ndarray:
    """Reads scales as they are, the embedding as [V, E], and matrices side by side as (in, out)."""
    first = tensors[0].shape
    if len(first) == 1:
        return tensors[0].read().astype(np.float32)
    if path == "embed":
        return _cast(tensors[0], dtype)
    leaf = np.empty((first[1], sum(tensor.shape[0] for tensor in tensors)), dtype)
    start = 0
    for tensor in tensors:
        stop = start + tensor.shape[0]
        leaf[:, start:stop] = _cast(tensor, dtype).T
        start = stop
    return leaf


def _cast(tensor: _Tensor, dtype: np.dtype) -> np.ndarray:
    array = tensor.read()
    if dtype == np.float16 and array.dtype != np.float16:
        largest = max(float(array.max()), -float(array.min()))
        limit = float(np.finfo(np.float16).max)
        if largest > limit:
            raise CheckpointError(
                f"{tensor.name} has a value of magnitude {largest:g}, beyond float16's {limit:g}; "
                "load it in bfloat16 or float32"
            )
    return array.astype(dtype, copy=False)


def _insert(params: Params, path: str, leaf: jax.Array) -> None:
    *parents, last = path.split("/")
    for parent in parents:
        params = params.setdefault(parent, {})
    params[last] = leaf
