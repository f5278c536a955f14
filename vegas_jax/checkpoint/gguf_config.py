"""The metadata of a GGUF file as the config.json that it was made from.

A setting that is not known is refused by name, lest the model compute something else.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vegas_jax.checkpoint.gguf_tokenizer import CONTROL, token_id, tokens, types
from vegas_jax.errors import CheckpointError

ARCHITECTURE_KEY = "general.architecture"

Metadata = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]

# architecture in GGUF: transformers' model_type and class
_CLASSES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gpt-oss": ("gpt_oss", "GptOssForCausalLM"),
}
_COMMON_KEYS = frozenset(
    {
        "vocab_size",
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.finetuned",
    }
)
_EXPERT_KEYS = frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length"})
_MORE_KEYS = {
    "qwen3moe": _EXPERT_KEYS | {"expert_weights_norm"},
    "gpt-oss": _EXPERT_KEYS | {"attention.sliding_window"},
}

# What generation_config.json names beside the one id that GGUF keeps, in the models read here.
_ENDS = frozenset(
    {"<|endoftext|>", "<|im_end|>"}  # Qwen
    | {"<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"}  # Llama 3
    | {"<|endoftext|>", "<|return|>", "<|call|>"}  # gpt-oss
)

# Llama 3's rope scaling, the same in every release but for the factor (8 in 3.1, 32 in 3.2).
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read_config(
    metadata: Metadata, shapes: Shapes, rope_factors: np.ndarray | None, path: Path
) -> dict[str, Any]:
    """The content of config.json for an architecture in `open_gguf`'s list.

    `eos_token_id` is a list, ascending: the ids that the file gives as ends of a text, of a turn or
    of a message, and special tokens that all models with them end at.

    Args:
      metadata: all keys of the file, as Python values.
      shapes: stored names and (out, in) shapes.
      rope_factors: what each of Llama 3's frequencies is divided by [head_dim / 2], or None.
      path: for errors.

    Raises:
      CheckpointError: a key that is missing, ill-typed, unknown, or has a value that is not known.
    """
    architecture = metadata[ARCHITECTURE_KEY]
    settings = _Settings(metadata, architecture, path)
    settings.check_known()
    model_type, class_name = _CLASSES[architecture]
    heads = settings.integer("attention.head_count")
    hidden = settings.integer("embedding_length")
    head_dim = settings.integer("attention.key_length", hidden // heads)
    settings.require("attention.value_length", head_dim)
    settings.require("rope.dimension_count", head_dim)
    config = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_act": "silu",
        "vocab_size": _vocab_size(shapes, path),
        "hidden_size": hidden,
        "num_hidden_layers": settings.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": settings.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": settings.number("rope.freq_base", 10000.0),
        "max_position_embeddings": settings.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": token_id(metadata, "bos", path),
        "eos_token_id": _eos_token_ids(metadata, path),
    }
    if architecture != "qwen2":  # which has biases without saying so
        config["attention_bias"] = "blk.0.attn_q.bias" in shapes
    config |= _feed_forward(settings, architecture, shapes)
    scaling = _rope_scaling(settings)
    if rope_factors is not None:
        scaling = _llama3_scaling(rope_factors, scaling, config, path)
    if scaling:
        config["rope_scaling"] = scaling
    if architecture == "gpt-oss":
        config |= _gpt_oss(settings, config)
    return config


class _Settings:
    """The keys of the file's architecture, less its name, each checked as it is read."""

    def __init__(self, metadata: Metadata, architecture: str, path: Path) -> None:
        self.prefix = f"{architecture}."
        self.path = path
        self.values = {
            key.removeprefix(self.prefix): value
            for key, value in metadata.items()
            if key.startswith(self.prefix)
        }
        self.known = _COMMON_KEYS | _MORE_KEYS.get(architecture, frozenset())

    def check_known(self) -> None:
        for key, value in self.values.items():
            if key not in self.known:
                raise self.wrong(key, value, "absent, its meaning is not known")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if type(value) is not int or value < 1:
            raise self.wrong(key, value, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Stored in float32, given as the shortest decimal that float32 tells from others."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.wrong(key, value, "a positive number")
        return float(str(np.float32(value)))

    def require(self, key: str, wanted: Any) -> None:
        if key in self.values and self.values[key] != wanted:
            raise self.wrong(key, self.values[key], f"{wanted!r} or absent")

    def wrong(self, key: str, value: Any, allowed: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: {self.prefix}{key} is {value!r:.80}, but must be {allowed}"
        )

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.path} lacks the key {self.prefix}{key}")
        return value


def _vocab_size(shapes: Shapes, path: Path) -> int:
    if "token_embd.weight" not in shapes:
        raise CheckpointError(f"{path} lacks the tensor token_embd.weight")
    return shapes["token_embd.weight"][0]


def _eos_token_ids(metadata: Metadata, path: Path) -> list[int]:
    ids = [token_id(metadata, name, path) for name in ("eos", "eot", "eom")]
    named = {i for i in ids if i is not None}
    texts, kinds = tokens(metadata, path), types(metadata, path)
    ends = {i for i, text in enumerate(texts) if text in _ENDS and kinds[i] == CONTROL}
    return sorted(named | ends)


def _feed_forward(settings: _Settings, architecture: str, shapes: Shapes) -> dict[str, Any]:
    if architecture == "gpt-oss":
        return {"intermediate_size": settings.integer("expert_feed_forward_length")}
    dense = {"intermediate_size": settings.integer("feed_forward_length")}
    if architecture == "llama":
        return dense | {"mlp_bias": "blk.0.ffn_gate.bias" in shapes}
    if architecture != "qwen3moe":
        return dense | {"use_sliding_window": False}
    return dense | {
        "use_sliding_window": False,
        "moe_intermediate_size": settings.integer("expert_feed_forward_length"),
        "num_experts": settings.integer("expert_count"),
        "num_experts_per_tok": settings.integer("expert_used_count"),
        "norm_topk_prob": settings.values.get("expert_weights_norm", True),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gpt_oss(settings: _Settings, config: Mapping[str, Any]) -> dict[str, Any]:
    """What GGUF leaves to the architecture's name is the same in both of its models."""
    kinds = ("sliding_attention", "full_attention")
    experts = settings.integer("expert_used_count")
    more: dict[str, Any] = {
        "num_local_experts": settings.integer("expert_count"),
        "num_experts_per_tok": experts,
        "experts_per_token": experts,
        "sliding_window": settings.integer("attention.sliding_window"),
        "layer_types": [kinds[i % 2] for i in range(config["num_hidden_layers"])],
        "swiglu_limit": 7.0,
    }
    scaling = config.get("rope_scaling")
    if scaling:
        defaults = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
        more["rope_scaling"] = defaults | scaling
        more["initial_context_length"] = scaling.get("original_max_position_embeddings")
    return more


def _rope_scaling(settings: _Settings) -> dict[str, Any] | None:
    kind = settings.values.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise settings.wrong("rope.scaling.type", kind, "one of none, linear, yarn")
    scaling: dict[str, Any] = {
        "rope_type": kind,
        "factor": settings.number("rope.scaling.factor"),
    }
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = settings.integer(
            "rope.scaling.original_context_length"
        )
        for name in ("beta_fast", "beta_slow"):
            if f"rope.scaling.yarn_{name}" in settings.values:
                scaling[name] = settings.number(f"rope.scaling.yarn_{name}")
    return scaling


def _llama3_scaling(
    stored: np.ndarray, scaling: Any, config: Mapping[str, Any], path: Path
) -> dict[str, Any] | None:
    """Llama 3's settings, which GGUF keeps only as the factors that they amount to."""
    if np.all(stored == 1):
        return scaling
    factor = float(stored.max())
    expected = _llama3_factors(config["rope_theta"], config["head_dim"], factor)
    fits = stored.shape == expected.shape and np.allclose(stored, expected, rtol=1e-4)
    if scaling or not fits:
        raise CheckpointError(
            f"{path} has rope_freqs.weight, at most {factor:g}, beside rope scaling {scaling}, but "
            f"must have Llama 3's factors and no other scaling"
        )
    return {"rope_type": "llama3", "factor": factor} | _LLAMA3


def _llama3_factors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """What each frequency is divided by [D / 2]: 1 for fast ones, `factor` for slow ones."""
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / (kept + (1 - kept) / factor)
