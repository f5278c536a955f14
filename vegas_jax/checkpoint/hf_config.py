"""Hugging Face `config.json` and `generation_config.json`, as transformers 4 and 5 write them.

transformers 4 has `rope_theta` and `rope_scaling` at the top level, transformers 5 has both in
`rope_parameters`. Whatever the model would compute wrongly is refused by name.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vegas_jax.checkpoint.json_fields import Fields
from vegas_jax.checkpoint.tensors import Shape
from vegas_jax.errors import CheckpointError, InputError
from vegas_jax.model.config import ModelConfig, MoEConfig, RopeScaling

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"

# More is a mistake, that would take all memory before anything else could say so.
MOST_LAYERS, MOST_EXPERTS, LARGEST_SIZE = 10_000, 10_000, 2**24


def read_config(folder: Path, *, dequantize: bool = False) -> ModelConfig:
    """Reads the model's shape from `folder`; `generation_config.json` may be absent.

    The end-of-sequence ids are the union of both files', ascending, less those outside the
    vocabulary, which can never be emitted. Absent keys default as in transformers' class of the
    architecture.

    Args:
      folder: of the checkpoint.
      dequantize: whether experts stored as MXFP4 are to be dequantised when they are loaded.

    Raises:
      CheckpointError: a file that is no JSON object, a missing or ill-typed key, an architecture
        that is none of ARCHITECTURES, or a field that the model would not follow; it is named.
    """
    path = Path(folder) / CONFIG_FILE
    generation = path.with_name(GENERATION_FILE)
    return config_of(
        Fields.read(path), Fields.read(generation) if generation.exists() else None, dequantize
    )


def read_fp8_block(folder: Path) -> Shape | None:
    """Rows and columns of a weight that share a factor, in FP8 checkpoints; None in others."""
    quantization = Fields.read(Path(folder) / CONFIG_FILE).objects("quantization_config")
    return _fp8_block(quantization) if quantization.get("quant_method") == "fp8" else None


def _fp8_block(quantization: Fields) -> Shape:
    block = quantization.integers("weight_block_size")
    if len(block) != 2 or min(block) < 1:
        raise quantization.wrong("weight_block_size", "two positive integers")
    return tuple(block)


def config_of(
    fields: Fields, generation: Fields | None = None, dequantize: bool = False
) -> ModelConfig:
    """`read_config` of objects that have been read."""
    architecture = _architecture(fields)
    settings = architecture(fields)
    if dequantize and settings.get("moe") is not None:
        settings["moe"] = dataclasses.replace(settings["moe"], packed=False)
    vocab_size = fields.integer("vocab_size")
    ends = set(_ids(fields)) | (set() if generation is None else set(_ids(generation)))
    try:
        return ModelConfig(
            vocab_size=vocab_size,
            hidden_size=_size(fields, "hidden_size"),
            intermediate_size=_size(fields, "intermediate_size"),
            num_layers=_num_layers(fields),
            num_heads=_size(fields, "num_attention_heads"),
            num_kv_heads=_num_kv_heads(fields),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            eos_token_ids=tuple(sorted(i for i in ends if 0 <= i < vocab_size)),
            **settings,
        )
    except CheckpointError:
        raise
    except InputError as error:
        raise CheckpointError(f"{fields.path}: {error}") from error


def _qwen3(fields: Fields) -> dict[str, Any]:
    """Qwen/Qwen3-8B. An absent head_dim is 128, whatever hidden_size and heads say."""
    _require_plain(fields, quantization=("fp8",))
    fields.require("attention_bias", False)
    return {
        "head_dim": _size(fields, "head_dim", 128),
        **_norm_and_rope(fields, longest=32768),
    }


def _qwen3_moe(fields: Fields) -> dict[str, Any]:
    """Qwen/Qwen3-30B-A3B."""
    _require_plain(fields, quantization=("fp8",))
    fields.require("attention_bias", False)
    step, dense = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
    layers = range(_num_layers(fields))
    moe = _moe(
        fields,
        num_experts=_num_experts(fields),
        num_experts_per_tok=fields.integer("num_experts_per_tok", 8),
        intermediate_size=_size(fields, "moe_intermediate_size", 768),
        norm_topk_prob=fields.boolean("norm_topk_prob", False),
        layers=tuple(i for i in layers if step > 0 and (i + 1) % step == 0 and i not in dense),
    )
    return {
        "head_dim": _head_dim(fields),
        **_norm_and_rope(fields, longest=32768),
        "moe": moe,
    }


def _llama(fields: Fields) -> dict[str, Any]:
    """meta-llama/Llama-3.1-8B."""
    _require_plain(fields)
    fields.require("mlp_bias", False)
    bias = fields.boolean("attention_bias", False)
    return {
        "head_dim": _head_dim(fields),
        **_norm_and_rope(fields, longest=2048, theta=1e4),
        "qk_norm": False,
        "qkv_bias": bias,
        "o_bias": bias,
    }


def _qwen2(fields: Fields) -> dict[str, Any]:
    """Qwen/Qwen2.5-7B-Instruct."""
    _require_plain(fields)
    return {
        "head_dim": _head_dim(fields),
        **_norm_and_rope(fields, longest=32768, theta=1e4),
        "qk_norm": False,
        "qkv_bias": True,
    }


def _mistral(fields: Fields) -> dict[str, Any]:
    """mistralai/Mistral-7B-Instruct-v0.3; earlier ones see only a window in every layer."""
    _require_plain(fields)
    if fields.get("sliding_window") is not None:
        raise fields.wrong("sliding_window", "null or absent: no layer would see the whole context")
    return {
        "head_dim": _head_dim(fields),
        **_norm_and_rope(fields, longest=131072, theta=1e4),
        "qk_norm": False,
    }


def _gpt_oss(fields: Fields) -> dict[str, Any]:
    """openai/gpt-oss-20b. An absent layer_types alternates, a window first."""
    fields.require("hidden_act", "silu")
    method = _quantization(fields, "mxfp4")
    count = _num_layers(fields)
    window = fields.integer("sliding_window", 128)
    kinds = fields.get("layer_types") or ["sliding_attention", "full_attention"] * count
    windows = {"sliding_attention": window, "full_attention": None}
    if not isinstance(kinds, list) or not all(kind in list(windows) for kind in kinds):
        raise fields.wrong("layer_types", f"a list of {' and '.join(windows)}")
    bias = fields.boolean("attention_bias", True)
    moe = _moe(
        fields,
        num_experts=_num_experts(fields),
        num_experts_per_tok=fields.integer("num_experts_per_tok", 4),
        intermediate_size=_size(fields, "intermediate_size"),
        norm_topk_prob=True,
        layers=tuple(range(count)),
        biases=True,
        swiglu_limit=fields.positive("swiglu_limit", 7.0),
        packed=method == "mxfp4",
    )
    return {
        "head_dim": _size(fields, "head_dim", 64),
        **_norm_and_rope(fields, longest=131072, eps=1e-5),
        "qk_norm": False,
        "qkv_bias": bias,
        "o_bias": bias,
        "sinks": True,
        "sliding_windows": tuple(windows[kind] for kind in kinds[:count]),
        "moe": moe,
    }


# By the name in `architectures`: the `model_type`, and what reads the fields that differ.
ARCHITECTURES: dict[str, tuple[str, Callable[[Fields], dict[str, Any]]]] = {
    "Qwen3ForCausalLM": ("qwen3", _qwen3),
    "Qwen3MoeForCausalLM": ("qwen3_moe", _qwen3_moe),
    "GptOssForCausalLM": ("gpt_oss", _gpt_oss),
    "LlamaForCausalLM": ("llama", _llama),
    "Qwen2ForCausalLM": ("qwen2", _qwen2),
    "MistralForCausalLM": ("mistral", _mistral),
}


def _architecture(fields: Fields) -> Callable[[Fields], dict[str, Any]]:
    named, model_type = fields.get("architectures", []), fields.get("model_type")
    if not isinstance(named, list):
        raise fields.wrong("architectures", "a list of names")
    for name, (kind, read) in ARCHITECTURES.items():
        if (name in named if named else model_type == kind) and model_type in (None, kind):
            return read
    raise CheckpointError(
        f"{fields.path} names architecture {json.dumps(named)} and model_type "
        f"{json.dumps(model_type)}, but must name one of {', '.join(ARCHITECTURES)}"
    )


def _require_plain(fields: Fields, quantization: tuple[str, ...] = ()) -> None:
    """What changes the computation, with the only values that the model follows."""
    fields.require("hidden_act", "silu")
    fields.require("use_sliding_window", False)
    kinds = fields.get("layer_types", [])
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise fields.wrong("layer_types", '"full_attention" in every layer')
    _quantization(fields, *quantization)


def _quantization(fields: Fields, *allowed: str) -> str | None:
    method: str | None = fields.objects("quantization_config").get("quant_method")
    if fields.get("quantization_config") is not None and method not in allowed:
        methods = [f"of quant_method {json.dumps(name)}" for name in allowed]
        raise fields.wrong("quantization_config", " or ".join([*methods, "absent"]))
    if method == "fp8":
        _fp8_block(fields.objects("quantization_config"))
    return method


def _moe(fields: Fields, **settings: Any) -> MoEConfig:
    try:
        return MoEConfig(**settings)
    except InputError as error:
        raise CheckpointError(f"{fields.path}: {error}") from error


def _num_experts(fields: Fields) -> int:
    """transformers 5 writes for all architectures what 4 wrote for gpt-oss alone."""
    local = "num_local_experts" in fields.values
    name = "num_local_experts" if local else "num_experts"
    return fields.integer(name, 128, most=MOST_EXPERTS)


def _num_layers(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", most=MOST_LAYERS)


def _size(fields: Fields, key: str, default: int | None = None) -> int:
    return fields.integer(key, default, least=1, most=LARGEST_SIZE)


def _head_dim(fields: Fields) -> int:
    if fields.get("head_dim") is not None:
        return _size(fields, "head_dim")
    return _size(fields, "hidden_size") // _size(fields, "num_attention_heads")


def _norm_and_rope(
    fields: Fields, *, longest: int, theta: float | None = None, eps: float = 1e-6
) -> dict[str, Any]:
    """What every architecture has, with what transformers' class takes for absent keys."""
    longest, rope = fields.integer("max_position_embeddings", longest), _rope(fields)
    return {
        "rms_norm_eps": fields.positive("rms_norm_eps", eps),
        "rope_theta": rope.positive("rope_theta", theta),
        "rope_scaling": _rope_scaling(rope, longest),
        "max_position_embeddings": longest,
    }


def _rope(fields: Fields) -> Fields:
    """The rope settings; `rope_scaling` goes first, as in transformers, but may lack the theta."""
    key = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    rope = fields.objects(key)
    theta = {"rope_theta": fields.values["rope_theta"]} if "rope_theta" in fields.values else {}
    return Fields(theta | rope.values, Path(f"{fields.path}: {key}") if rope.values else rope.path)


def _rope_scaling(rope: Fields, longest: int) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    supported = ("linear", "yarn", "llama3")
    if kind not in supported:
        key = "rope_type" if "rope_type" in rope.values else "type"
        choices = ", ".join(map(json.dumps, ("default", *supported)))
        raise rope.wrong(key, f"one of {choices} or absent")
    original = rope.integer("original_max_position_embeddings", longest, least=1)
    absent = longest / original if kind == "yarn" else None
    settings: dict[str, Any] = {
        "kind": kind,
        "factor": rope.positive("factor", absent),
        "original_max_position_embeddings": original,
    }
    if kind == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            settings[name] = rope.positive(name)
    if kind == "yarn":
        settings |= _yarn(rope, settings["factor"])
    try:
        return RopeScaling(**settings)
    except InputError as error:
        raise CheckpointError(f"{rope.path}: {error}") from error


def _yarn(rope: Fields, factor: float) -> dict[str, Any]:
    settings: dict[str, Any] = {"truncate": rope.boolean("truncate", True)}
    for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        given = rope.get(name) is not None
        settings[name] = rope.positive(name) if given else default
    if rope.get("attention_factor") is not None:
        settings["attention_factor"] = rope.positive("attention_factor")
    elif rope.get("mscale") and rope.get("mscale_all_dim"):  # DeepSeek's way of saying it
        scales = (rope.positive(name) for name in ("mscale", "mscale_all_dim"))
        over, under = (0.1 * scale * math.log(factor) + 1.0 for scale in scales)
        settings["attention_factor"] = over / under
    return settings


def _num_kv_heads(fields: Fields) -> int:
    """null means as many as there are query heads."""
    if fields.values.get("num_key_value_heads", 0) is None:
        return _size(fields, "num_attention_heads")
    return _size(fields, "num_key_value_heads")


def _ids(fields: Fields) -> list[int]:
    value = fields.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(i) is int for i in ids):
        raise fields.wrong("eos_token_id", "an integer, a list of integers or null")
    return ids
