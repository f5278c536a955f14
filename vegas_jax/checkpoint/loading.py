"""A checkpoint as what the rest of the library works with."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels.dispatch import KERNELS, lacks
from vegas_jax.checkpoint.gguf import GGUF, open_gguf
from vegas_jax.checkpoint.hf_config import config_of, read_config, read_fp8_block
from vegas_jax.checkpoint.huggingface import (
    Params,
    build_params,
    is_orbax,
    read_params,
    resolve,
)
from vegas_jax.checkpoint.json_fields import Fields
from vegas_jax.errors import InputError, check
from vegas_jax.model.transformer import Transformer
from vegas_jax.sharding import placer, rearrange, stored_shardings
from vegas_jax.text import tokenizer as text_tokenizer
from vegas_jax.text.chat import ChatTemplate, read_template
from vegas_jax.text.tokenizer import Tokenizer


def load(
    path_or_name: str | Path = "codelm-16m",
    dtype: Any = None,
    kernels: str = "auto",
    *,
    dequantize: bool = False,
    mesh: Mesh | None = None,
) -> tuple[Transformer, Params, Tokenizer | None]:
    """Loads a Hugging Face or Orbax folder, a GGUF file, or the checkpoint that is shipped.

    Args:
      path_or_name: a folder with config.json and *.safetensors, or one that
        `python -m vegas_jax.convert` wrote; a *.gguf file; or `codelm-16m`.
      dtype: float32, bfloat16 or float16, as a name or a JAX dtype. None takes what is fast on the
        default device: float32 on a CPU, bfloat16 on a TPU or GPU, float16 on a GPU that has no
        bfloat16.
      kernels: implementation of the ops, see `pallas_kernels`.
      dequantize: whether experts stored as MXFP4 become `dtype` in memory: four times the bytes.
      mesh: devices to share the work, see docs/sharding.md: `vegas_jax.sharding.parse_mesh`, or one
        with an axis `data`, an axis `model` or both. Each device gets only its part of a parameter.

    Returns:
      model, params, tokenizer; the tokenizer is None where the checkpoint has none.

    Raises:
      CheckpointError: the checkpoint is missing, incomplete or of an unknown kind.
      InputError: an unknown dtype or kernels, or a mesh that the model cannot be split over.
    """
    check(kernels in KERNELS, "kernels", kernels, f"one of {', '.join(KERNELS)}")
    lacking = lacks(kernels)
    if lacking is not None:
        raise InputError(f"kernels is {kernels!r}, which needs {lacking}")
    dtype = default_dtype() if dtype is None else _dtype(dtype)
    folder = resolve(path_or_name)
    if folder.is_file():  # GGUF
        file = _open_gguf(folder, folder.stat().st_mtime)
        config = config_of(Fields(file.config, folder))
        model = Transformer(config, dtype, kernels, mesh)
        params = build_params(dict(file.tensors), config, dtype, folder, placer(model))
        found = None if file.tokenizer is None else Tokenizer(file.tokenizer)
        return model, params, found
    config = read_config(folder, dequantize=dequantize)
    tokenizer = text_tokenizer.load(folder)
    model = Transformer(config, dtype, kernels, mesh)
    return model, _params(folder, model), tokenizer


def load_chat_template(
    path_or_name: str | Path, file: str | Path | None = None
) -> ChatTemplate | None:
    """The checkpoint's chat template, or that of `file`; None where there is none.

    Raises:
      InputError: see `ChatTemplate`; a CheckpointError where the checkpoint is at fault.
    """
    folder = resolve(path_or_name)
    if folder.is_dir():
        return ChatTemplate.load(folder, file)
    found = _open_gguf(folder, folder.stat().st_mtime)
    tokens = {"bos_token": found.bos_token, "eos_token": found.eos_token}
    source = found.chat_template if file is None else read_template(Path(file))
    special = {name: text for name, text in tokens.items() if text is not None}
    return None if source is None else ChatTemplate(source, special)


def _params(folder: Path, model: Transformer) -> Params:
    config, dtype = model.config, model.dtype
    if not is_orbax(folder):
        return read_params(folder, config, dtype, read_fp8_block(folder), placer(model))
    from vegas_jax.checkpoint import orbax  # slow to import

    if model.mesh is None:
        return orbax.restore_params(folder, config, dtype)
    return rearrange(model, orbax.restore_params(folder, config, dtype, stored_shardings(model)))


# Reading the vocabulary takes seconds, and a chat needs it twice.
@functools.lru_cache(maxsize=1)
def _open_gguf(path: Path, changed: float) -> GGUF:
    return open_gguf(path)


def default_dtype() -> Any:
    """The compute dtype that is fast on the default device."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return jnp.dtype("float32")
    capability = getattr(device, "compute_capability", None)
    if device.platform == "gpu" and capability is not None and float(capability) < 8.0:
        return jnp.dtype("float16")  # Turing and older have no bfloat16
    return jnp.dtype("bfloat16")


def _dtype(dtype: Any) -> Any:
    allowed = ("float32", "bfloat16", "float16")
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    check(name in allowed, "dtype", name, f"one of {', '.join(allowed)}")
    return jnp.dtype(name)
