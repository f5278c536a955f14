"""GGUF files, as llama.cpp writes them, seen as the Hugging Face folder that each was made from.

The config has a config.json's keys, tensors have the hub's names and (out, in) shapes, and what the
conversion did to them is undone. Quantised tensors are widened one at a time, when they are read.
Sources: the GGUF specification (github.com/ggml-org/ggml, docs/gguf.md) and llama.cpp's conversion.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from vegas_jax.checkpoint import gguf_config, gguf_tokenizer
from vegas_jax.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ROPE_FACTORS = "rope_freqs.weight"
_WIDENED = frozenset(
    {"BF16", "MXFP4", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
    | {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0"}
    | {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"}
)
_AS_STORED = frozenset({"F16", "F32"})

_TOP_NAMES = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ATTENTION_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_DENSE_NAMES = _ATTENTION_NAMES | {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORM_NAMES = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_EXPERT_NAMES = {
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_LAYER_NAMES: dict[str, dict[str, str]] = {
    "llama": _DENSE_NAMES,
    "qwen2": _DENSE_NAMES,
    "qwen3": _DENSE_NAMES | _HEAD_NORM_NAMES,
    "qwen3moe": _ATTENTION_NAMES
    | _HEAD_NORM_NAMES
    | _EXPERT_NAMES
    | {"ffn_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.gate"},
    "gpt-oss": _ATTENTION_NAMES
    | _EXPERT_NAMES
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
        "attn_sinks": "self_attn.sinks",
    },
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in an open GGUF file; nothing is read before `read`.

    Attributes:
      name: as it is stored, such as `blk.0.attn_q.weight`.
      shape: in the hub's order: (out, in), or (experts, out, in).
      dtype: how it is stored, such as `Q4_K`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    _data: np.ndarray
    _interleaved_heads: int = 0

    @property
    def is_float(self) -> bool:
        """Whatever is stored is widened."""
        return True

    def read(self) -> np.ndarray:
        """The values in `shape`: float16 where float16 is stored, else float32."""
        if self.dtype in _AS_STORED:
            array = np.array(self._data)
        else:
            import gguf

            array = gguf.dequantize(self._data, gguf.GGMLQuantizationType[self.dtype])
        array = array.reshape(self.shape)
        return _as_halves(array, self._interleaved_heads) if self._interleaved_heads else array


@dataclasses.dataclass(frozen=True)
class GGUF:
    """What a Hugging Face folder of the same model holds.

    Attributes:
      config: what config.json holds, with generation_config.json's `eos_token_id`.
      tensors: by the hub's names without the leading `model.`. A layer's experts are three tensors,
        `mlp.experts.{gate,up,down}_proj.weight` [X, out, in], with `.bias` [X, out] where there is
        one (gpt-oss, where the hub's files interleave gate and up).
      tokenizer: None when the file has no vocabulary.
      chat_template: Jinja source.
      bos_token, eos_token: as templates and texts spell them.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    tokenizer: tokenizers.Tokenizer | None
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None


def open_gguf(path: str | Path) -> GGUF:
    """Opens a model in one GGUF file; its weights stay on disk until they are read.

    Architectures llama (Llama and Mistral), qwen2, qwen3, qwen3moe and gpt-oss.

    Raises:
      CheckpointError: the package gguf is not installed; the file is missing, truncated, one of
        several, big-endian, or no GGUF file; or its architecture, a setting, a tensor, its
        quantisation or its tokenizer is not known, and is named with its value.
    """
    path = Path(path)
    reader = _reader(path)
    try:
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except ValueError as error:
        raise CheckpointError(f"{path} has metadata that is no UTF-8 text: {error}") from error
    if metadata.get("split.count", 1) > 1:
        raise CheckpointError(
            f"{path} is one of {metadata['split.count']} parts of a model, but must be the whole, "
            "as llama-gguf-split --merge makes it"
        )
    architecture = metadata.get(gguf_config.ARCHITECTURE_KEY)
    if architecture not in _LAYER_NAMES:
        raise CheckpointError(
            f"{path} has {gguf_config.ARCHITECTURE_KEY} {architecture!r}, but must have one of "
            f"{', '.join(_LAYER_NAMES)}"
        )
    stored = {tensor.name: _tensor(tensor, path) for tensor in reader.tensors}
    factors = stored.pop(_ROPE_FACTORS, None) if architecture == "llama" else None
    config = gguf_config.read_config(
        metadata,
        {name: tensor.shape for name, tensor in stored.items()},
        None if factors is None else factors.read(),
        path,
    )
    return GGUF(
        path=path,
        config=config,
        tensors=_named(stored, architecture, config, path),
        tokenizer=gguf_tokenizer.read_tokenizer(metadata, path),
        chat_template=metadata.get("tokenizer.chat_template"),
        bos_token=gguf_tokenizer.token_text(metadata, "bos", path),
        eos_token=gguf_tokenizer.token_text(metadata, "eos", path),
    )


def _reader(path: Path) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(
            f"{path} is read with the package gguf, which is not installed: "
            "pip install vegas_jax[gguf]"
        ) from error
    _check_header(path)
    try:
        return _bounded(gguf.GGUFReader)(path)
    except (ValueError, LookupError, OverflowError, RecursionError, OSError) as error:
        unknown = re.search(r"(\d+)\)? is not a valid GGMLQuantizationType", str(error))
        problem = (
            f"stores a tensor in quantisation {unknown[1]}, which the package gguf does not know"
            if unknown
            else f"cannot be read as GGUF, it may be truncated: {error}"
        )
        raise CheckpointError(f"{path} {problem}") from error


def _check_header(path: Path) -> None:
    try:
        with path.open("rb") as file:
            header = file.read(8)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    magic, version = header[:4], int.from_bytes(header[4:], "little")
    if magic != _MAGIC:
        raise CheckpointError(f"{path} begins with {magic!r}, but a GGUF file with {_MAGIC!r}")
    if len(header) == 8 and version not in _VERSIONS:
        big = " (big-endian)" if version & 0xFFFF == 0 else ""
        raise CheckpointError(
            f"{path} has GGUF version {version:#x}{big}, but must have one of "
            f"{', '.join(map(str, _VERSIONS))}"
        )


class _Bytes:
    """The file as the package's reader slices it, 760 thousand times for Qwen2.5's vocabulary.

    A memmap itself takes 4 times as long, and gives what it has where a slice goes beyond its end.
    """

    def __init__(self, mapped: np.memmap) -> None:
        self._array = np.asarray(mapped)

    def __getitem__(self, part: slice) -> np.ndarray:
        if part.stop > len(self._array):
            raise IndexError(
                f"it has {len(self._array)} bytes, but should have {part.stop} or more"
            )
        return self._array[part]


def _bounded(reader: Any) -> Any:
    class Reader(reader):
        @property
        def data(self) -> _Bytes:
            return self._bytes

        @data.setter
        def data(self, mapped: np.memmap) -> None:
            self._bytes = _Bytes(mapped)

    return Reader


def _tensor(stored: Any, path: Path) -> Tensor:
    dtype = stored.tensor_type.name
    if dtype not in _AS_STORED | _WIDENED:
        raise CheckpointError(
            f"{path} stores {stored.name} in quantisation {dtype}, but must use one of "
            f"{', '.join(sorted(_AS_STORED | _WIDENED))}"
        )
    return Tensor(stored.name, tuple(reversed(stored.shape.tolist())), dtype, stored.data)


def _named(
    stored: Mapping[str, Tensor], architecture: str, config: Mapping[str, Any], path: Path
) -> dict[str, Tensor]:
    """The tensors by the hub's names; for llama, rows of q and k in the hub's order."""
    tensors = {}
    for name, tensor in stored.items():
        hub_name = _hub_name(name, architecture)
        if hub_name is None:
            raise CheckpointError(f"{path} stores {name}, which no {architecture} model has")
        if architecture == "llama":
            tensor = _with_heads(tensor, hub_name, config, path)
        tensors[hub_name] = tensor
    return tensors


def _hub_name(name: str, architecture: str) -> str | None:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES[architecture]:
        return None
    layer, part, kind = match.groups()
    hub_part = _LAYER_NAMES[architecture][part]
    suffix = "" if part == "attn_sinks" else f".{kind}"  # a bare parameter on the hub
    return f"layers.{layer}.{hub_part}{suffix}"


def _with_heads(tensor: Tensor, hub_name: str, config: Mapping[str, Any], path: Path) -> Tensor:
    """Marks q and k, where llama.cpp has side by side the rows that the hub has half a head apart.

    Its rope turns neighbouring rows.
    """
    counts = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    heads = counts.get(hub_name.split(".")[-2])
    if heads is None:
        return tensor
    if tensor.shape[0] != heads * config["head_dim"]:
        raise CheckpointError(
            f"{path} stores {tensor.name} {list(tensor.shape)}, but must have "
            f"{heads} heads of {config['head_dim']} rows"
        )
    return dataclasses.replace(tensor, _interleaved_heads=heads)


def _as_halves(array: np.ndarray, heads: int) -> np.ndarray:
    """Within each head, rows 0, 2, 4, ... and then 1, 3, 5, ..."""
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)
