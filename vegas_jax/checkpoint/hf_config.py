"""Hugging Face `config.json` and `generation_config.json`, as transformers 4 and 5 write them.

transformers 4 has `rope_theta` and `rope_scaling` at the top level, transformers 5 has both in
`rope_parameters`. Whatever the model would compute wrongly is refused by name.
"""

import json
from pathlib import Path
from typing import Any

from vegas_jax.config import ModelConfig
from vegas_jax.errors import CheckpointError, InputError

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
ARCHITECTURE = "Qwen3ForCausalLM"
MODEL_TYPE = "qwen3"

# What transformers' Qwen3Config takes for an absent key; head_dim is not hidden_size / num_heads.
_DEFAULTS = {
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
}

# Fields that change the computation, each with the only values that the model follows.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu"),
    "attention_bias": (None, False),
    "use_sliding_window": (None, False),
    "quantization_config": (None,),
}


def read_config(folder: Path) -> ModelConfig:
    """Reads the model's shape from `folder`; `generation_config.json` may be absent.

    The end-of-sequence ids are the union of both files', ascending, less those outside the
    vocabulary, which can never be emitted. An absent `head_dim` is 128, as in transformers'
    Qwen3Config (huggingface.co/Qwen/Qwen3-8B, `config.json`).

    Raises:
      CheckpointError: a file that is no JSON object, a missing or ill-typed key, an architecture
        other than Qwen3ForCausalLM, or a field that the model would not follow; it is named.
    """
    path = Path(folder) / CONFIG_FILE
    raw = _DEFAULTS | _read_object(path)
    _check_architecture(raw, path)
    _check_supported(raw, path)
    vocab_size = _integer(raw, "vocab_size", path)
    try:
        return ModelConfig(
            vocab_size=vocab_size,
            hidden_size=_integer(raw, "hidden_size", path),
            intermediate_size=_integer(raw, "intermediate_size", path),
            num_layers=_integer(raw, "num_hidden_layers", path),
            num_heads=_integer(raw, "num_attention_heads", path),
            num_kv_heads=_num_kv_heads(raw, path),
            head_dim=_integer(raw, "head_dim", path),
            rms_norm_eps=_positive(raw, "rms_norm_eps", path),
            rope_theta=_rope_theta(raw, path),
            tie_word_embeddings=_boolean(raw, "tie_word_embeddings", path),
            max_position_embeddings=_integer(raw, "max_position_embeddings", path),
            eos_token_ids=tuple(i for i in _eos_token_ids(raw, path) if 0 <= i < vocab_size),
        )
    except CheckpointError:
        raise
    except InputError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds a JSON {type(raw).__name__}, but must hold an object")
    return raw


def _check_architecture(raw: dict[str, Any], path: Path) -> None:
    architectures = raw.get("architectures") or []
    model_type = raw.get("model_type")
    named = ARCHITECTURE in architectures if architectures else model_type == MODEL_TYPE
    if not named or model_type not in (None, MODEL_TYPE):
        raise CheckpointError(
            f"{path} names architecture {json.dumps(architectures)} and model_type "
            f"{json.dumps(model_type)}, but only {ARCHITECTURE} ({MODEL_TYPE}) is supported"
        )


def _check_supported(raw: dict[str, Any], path: Path) -> None:
    for key, allowed in _SUPPORTED.items():
        if raw.get(key) not in allowed:
            raise _wrong(path, key, raw[key], f"{json.dumps(allowed[-1])} or absent")
    layer_types = raw.get("layer_types") or []
    if any(kind != "full_attention" for kind in layer_types):
        raise _wrong(path, "layer_types", layer_types, '"full_attention" in every layer')
    key, rope = _rope(raw, path)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise _wrong(path, f"{key}.rope_type", rope_type, '"default" or absent')


def _rope(raw: dict[str, Any], path: Path) -> tuple[str, dict[str, Any]]:
    """The key and the value of the rope settings; `rope_scaling` goes first, as in transformers."""
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    rope = raw.get(key) or {}
    if not isinstance(rope, dict):
        raise _wrong(path, key, rope, "an object or null")
    return key, rope


def _rope_theta(raw: dict[str, Any], path: Path) -> float:
    _, rope = _rope(raw, path)
    return _positive(rope if "rope_theta" in rope else raw, "rope_theta", path)


def _num_kv_heads(raw: dict[str, Any], path: Path) -> int:
    """null means as many as there are query heads."""
    if raw.get("num_key_value_heads", 0) is None:
        return _integer(raw, "num_attention_heads", path)
    return _integer(raw, "num_key_value_heads", path)


def _eos_token_ids(raw: dict[str, Any], path: Path) -> list[int]:
    generation_path = path.with_name(GENERATION_FILE)
    ids = set(_ids(raw, path))
    if generation_path.exists():
        ids |= set(_ids(_read_object(generation_path), generation_path))
    return sorted(ids)


def _ids(raw: dict[str, Any], path: Path) -> list[int]:
    value = raw.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(i) is int for i in ids):
        raise _wrong(path, "eos_token_id", value, "an integer, a list of integers or null")
    return ids


def _integer(raw: dict[str, Any], key: str, path: Path) -> int:
    value = _required(raw, key, path)
    if type(value) is not int:
        raise _wrong(path, key, value, "an integer")
    return value


def _positive(raw: dict[str, Any], key: str, path: Path) -> float:
    value = _required(raw, key, path)
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise _wrong(path, key, value, "a positive number")
    return float(value)


def _boolean(raw: dict[str, Any], key: str, path: Path) -> bool:
    value = _required(raw, key, path)
    if not isinstance(value, bool):
        raise _wrong(path, key, value, "true or false")
    return value


def _required(raw: dict[str, Any], key: str, path: Path) -> Any:
    if key not in raw:
        raise CheckpointError(f"{path} lacks the key {key}")
    return raw[key]


def _wrong(path: Path, key: str, value: Any, allowed: str) -> CheckpointError:
    return CheckpointError(f"{path}: {key} is {json.dumps(value)}, but must be {allowed}")
