"""The small random checkpoints: what is in them, and how each is stored."""

import dataclasses
import json
import pathlib
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.goldens import quantization

Fields = dict[str, Any]

COMMON = {
    "vocab_size": 256,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "bos_token_id": None,
    "pad_token_id": None,
}
FP8_LAYERS = 2


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A random checkpoint.

    Attributes:
      kind: what the names of its classes in transformers begin with.
      seed: of its weights; 1000 more is that of the prompts.
      settings: fields of the config besides COMMON; rope_theta and rope_scaling as in config.json
        of transformers 4.
      dtype: what weights are stored in.
      layout: how tensors are named and stored:
        published  as `save_pretrained` does and as on the hub
        fused      every layer's experts in two tensors, as transformers 5 has them in memory
        bare       without the prefix `model.`
        mxfp4      experts quantised as in openai/gpt-oss-20b
        fp8        projections quantised as in Qwen/Qwen3-8B-FP8
      shard_size: what a file may hold at most.
      config_4: None when config.json is what transformers 5 writes. Otherwise it is as transformers
        4 wrote those on the hub, and these fields are added; those that are None here are removed.
      lengths: of the prompts.
    """

    kind: str
    seed: int
    settings: Fields
    dtype: torch.dtype = torch.float32
    layout: str = "published"
    shard_size: str = "5GB"
    config_4: Fields | None = None
    lengths: tuple[int, ...] = (1, 129, 400)


WINDOW_LENGTHS = (1, 127, 128, 129, 400)
CHECKPOINTS = {
    # Grouped queries, and num_heads * head_dim != hidden_size.
    "qwen3-tied": Checkpoint(
        "Qwen3",
        seed=0,
        settings={
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "eos_token_id": 7,
        },
        lengths=WINDOW_LENGTHS,
    ),
    # Weights stored in bfloat16, four query heads to a KV head, another rope_theta.
    "qwen3-untied": Checkpoint(
        "Qwen3",
        seed=1,
        settings={
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rope_theta": 1e4,
            "tie_word_embeddings": False,
            "eos_token_id": [3, 5],
        },
        dtype=torch.bfloat16,
        lengths=WINDOW_LENGTHS,
    ),
    # One query head to a KV head, in several shards.
    "qwen3-mha": Checkpoint(
        "Qwen3",
        seed=2,
        settings={
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 16,
            "vocab_size": 211,
            "tie_word_embeddings": False,
            "eos_token_id": None,
        },
        shard_size="64KB",
        lengths=WINDOW_LENGTHS,
    ),
    # The rope scaling that Qwen3's model cards tell one to add.
    "qwen3-yarn": Checkpoint(
        "Qwen3",
        seed=3,
        settings={
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 512,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            "tie_word_embeddings": True,
            "eos_token_id": 7,
        },
        dtype=torch.bfloat16,
        config_4={},
    ),
    # As Qwen/Qwen3-Embedding-0.6B is stored.
    "qwen3-bare": Checkpoint(
        "Qwen3",
        seed=4,
        settings={
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "eos_token_id": 7,
        },
        dtype=torch.bfloat16,
        layout="bare",
    ),
    # Matrices of more than one block, which the blocks do not divide.
    "qwen3-fp8": Checkpoint(
        "Qwen3",
        seed=5,
        settings={
            "vocab_size": 128,
            "hidden_size": 160,
            "intermediate_size": 200,
            "num_hidden_layers": FP8_LAYERS,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "tie_word_embeddings": False,
            "eos_token_id": 7,
        },
        dtype=torch.bfloat16,
        layout="fp8",
        config_4={
            "quantization_config": {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "modules_to_not_convert": [
                    "lm_head",
                    *(
                        f"model.layers.{layer}.{norm}"
                        for layer in range(FP8_LAYERS)
                        for norm in ("input_layernorm", "post_attention_layernorm")
                    ),
                ],
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
            },
        },
    ),
    # Every layer sparse, as Qwen/Qwen3-30B-A3B.
    "qwen3-moe": Checkpoint(
        "Qwen3Moe",
        seed=6,
        settings={
            "hidden_size": 48,
            "intermediate_size": 80,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "tie_word_embeddings": False,
            "eos_token_id": 7,
        },
        dtype=torch.bfloat16,
        config_4={"max_window_layers": 3},
    ),
    # Layers 1 and 5 are sparse: every second one, but for layer 3.
    "qwen3-moe-steps": Checkpoint(
        "Qwen3Moe",
        seed=26,
        settings={
            "vocab_size": 128,
            "hidden_size": 32,
            "intermediate_size": 64,
            "moe_intermediate_size": 48,
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "tie_word_embeddings": False,
            "eos_token_id": 7,
        },
        layout="fused",
    ),
    # beta_fast leaves two frequencies as they are.
    "gpt-oss": Checkpoint(
        "GptOss",
        seed=16,
        settings={
            "vocab_size": 128,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "sliding_window": 128,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
            },
            "tie_word_embeddings": False,
            "eos_token_id": 7,
        },
        dtype=torch.bfloat16,
        lengths=WINDOW_LENGTHS,
    ),
    "gpt-oss-mxfp4": Checkpoint(
        "GptOss",
        seed=9,
        settings={
            "vocab_size": 128,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 128,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
            },
            "tie_word_embeddings": False,
            "eos_token_id": [7, 9],
        },
        dtype=torch.bfloat16,
        layout="mxfp4",
        config_4={
            "experts_per_token": 3,
            "initial_context_length": 64,
            "quantization_config": {
                "modules_to_not_convert": [
                    "model.layers.*.self_attn",
                    "model.layers.*.mlp.router",
                    "model.embed_tokens",
                    "lm_head",
                ],
                "quant_method": "mxfp4",
            },
            "swiglu_limit": 7.0,
        },
        lengths=WINDOW_LENGTHS,
    ),
    # Frequencies of all three sorts: kept, between, divided by the factor.
    "llama3": Checkpoint(
        "Llama",
        seed=10,
        settings={
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "rope_theta": 8000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": [7, 8, 9],
        },
        dtype=torch.bfloat16,
        config_4={},
    ),
    # Biases of all four projections of attention; head_dim follows from hidden_size.
    "llama-untied-bias": Checkpoint(
        "Llama",
        seed=25,
        settings={
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "attention_bias": True,
            "mlp_bias": False,
            "rope_theta": 1e4,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        dtype=torch.float16,
        config_4={"head_dim": None},
    ),
    # config.json names a window, as those on the hub do, that use_sliding_window leaves out.
    "qwen2": Checkpoint(
        "Qwen2",
        seed=42,
        settings={
            "hidden_size": 64,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 7,
        },
        dtype=torch.bfloat16,
        shard_size="150KB",
        config_4={"sliding_window": 64, "max_window_layers": 1},
    ),
    # num_heads * head_dim != hidden_size, one KV head.
    "mistral": Checkpoint(
        "Mistral",
        seed=13,
        settings={
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        dtype=torch.bfloat16,
    ),
}


def make_checkpoint(checkpoint: Checkpoint, folder: pathlib.Path) -> None:
    """Saves a random checkpoint whose attention is sharp and whose logits differ."""
    settings = COMMON | checkpoint.settings
    rope = {"rope_type": "default"} | settings.pop("rope_scaling", {})
    rope["rope_theta"] = settings.pop("rope_theta")
    config = getattr(transformers, f"{checkpoint.kind}Config")(**settings, rope_parameters=rope)
    model = getattr(transformers, f"{checkpoint.kind}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(checkpoint.seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            key = f"{checkpoint.kind}.{key}"
            weight.copy_(random_weight(key, weight.shape, generator))
    model.to(checkpoint.dtype)
    model.save_pretrained(
        folder,
        max_shard_size=checkpoint.shard_size,
        save_original_format=checkpoint.layout != "fused",
    )
    if checkpoint.layout in ("bare", "mxfp4", "fp8"):
        store_otherwise(folder / "model.safetensors", checkpoint.layout)
    if checkpoint.config_4 is not None:
        write_config_4(folder / "config.json", checkpoint.config_4)


def random_weight(key: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Norms around 1 (around 2 for q and k, for sharp attention), matrices that keep the scale."""
    noise = torch.randn(shape, generator=generator)
    if key.endswith(("q_norm.weight", "k_norm.weight")):
        return 2.0 + 0.3 * noise
    if key.endswith("norm.weight"):
        return 1.0 + 0.2 * noise
    if "embed_tokens" in key:
        return 0.5 * noise
    if key.endswith("bias"):
        return 0.5 * noise
    if key.endswith("sinks"):
        return 2.0 + noise
    # gpt-oss has its experts (in, out). Their hidden values are large enough to be clamped.
    if key.startswith("GptOss") and key.endswith("experts.gate_up_proj"):
        return 4.0 * noise / shape[-2] ** 0.5
    if key.startswith("GptOss") and key.endswith("experts.down_proj"):
        return 0.3 * noise / shape[-2] ** 0.5
    return 1.5 * noise / shape[-1] ** 0.5


def store_otherwise(path: pathlib.Path, layout: str) -> None:
    """Rewrites a file of weights in a layout that `save_pretrained` does not know."""
    tensors = load_file(path)
    if layout == "bare":
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    elif layout == "mxfp4":
        tensors = quantization.to_mxfp4(tensors)
    else:
        tensors = quantization.to_fp8(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def write_config_4(path: pathlib.Path, changes: Fields) -> None:
    """Rewrites a config.json of transformers 5 as transformers 4 has it, with some changes."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    if config["model_type"] == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    if config["model_type"] != "gpt_oss":
        config.pop("layer_types", None)
    config |= changes
    for name, value in changes.items():
        if value is None:
            del config[name]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
