"""What a transformer looks like: `ModelConfig`, frozen and hashable, so that it can be static.

One model serves all architectures; these settings are where they differ.
"""

import dataclasses
from typing import Any, Literal, get_args

from vegas_jax.errors import check

RopeKind = Literal["linear", "yarn", "llama3"]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts beyond those of pretraining.

    Attributes:
      kind: `linear`, `yarn` (arXiv 2309.00071) or `llama3` (model card: meta-llama/Llama-3.1-8B).
      factor: by how much the slowest frequencies are slowed down.
      original_max_position_embeddings: tokens of pretraining's contexts.
      beta_fast: yarn: rotations in such a context from which on a frequency stays as it is.
      beta_slow: yarn: rotations up to which it is slowed down by the whole factor.
      truncate: yarn: whether the two bounds between are rounded to whole dimensions.
      attention_factor: yarn: queries and keys are multiplied by it; None is 0.1 ln(factor) + 1.
      low_freq_factor: llama3: what beta_slow is in yarn.
      high_freq_factor: llama3: what beta_fast is in yarn.
    """

    kind: RopeKind
    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        choices = get_args(RopeKind)
        check(self.kind in choices, "rope_type", self.kind, f"one of {', '.join(choices)}")
        check(self.factor >= 1, "factor", self.factor, "at least 1")
        least = self.original_max_position_embeddings
        check(least >= 1, "original_max_position_embeddings", least, "at least 1")
        low, high = self.low_freq_factor, self.high_freq_factor
        check(low < high, "low_freq_factor", low, f"below high_freq_factor ({high})")


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts in place of the feed-forward.

    Attributes:
      num_experts: X.
      num_experts_per_tok: experts that each token is sent to, by the router's largest logits.
      intermediate_size: F of each expert.
      norm_topk_prob: whether the chosen experts' weights add up to 1.
      layers: which layers have experts; the others have one feed-forward.
      biases: whether router and experts have biases (gpt-oss).
      swiglu_limit: None is SwiGLU; a number is gpt-oss's: gate at most that, up within plus and
        minus that, gate * sigmoid(1.702 gate) * (up + 1).
      packed: whether the experts' weights stay MXFP4 in memory, four bits a weight and one scale
        for 32 of them (OCP Microscaling Formats 1.0).
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    norm_topk_prob: bool
    layers: tuple[int, ...]
    biases: bool = False
    swiglu_limit: float | None = None
    packed: bool = False

    def __post_init__(self) -> None:
        for name in ("num_experts", "intermediate_size"):
            check(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        most, chosen = self.num_experts, self.num_experts_per_tok
        check(1 <= chosen <= most, "num_experts_per_tok", chosen, f"from 1 to num_experts ({most})")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a pre-norm transformer with grouped-query attention and rotary embedding.

    The defaults are those of Qwen3 (model card: Qwen/Qwen3-8B `config.json`).

    Attributes:
      head_dim: independent of hidden_size / num_heads.
      rope_scaling: None leaves the frequencies as they are.
      qk_norm: RMS norm over head_dim of queries and keys (Qwen3).
      qkv_bias: biases of queries, keys and values (Qwen2, gpt-oss).
      o_bias: a bias of attention's output (gpt-oss).
      sinks: a learned logit a head that enters the softmax and has no value (gpt-oss).
      sliding_windows: per layer, of how many positions attention sees the last; None is all. ()
        is all, in every layer.
      moe: None has one feed-forward in every layer.
      eos_token_ids: the union of what `config.json` and `generation_config.json` name.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qk_norm: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    sinks: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    moe: MoEConfig | None = None
    max_position_embeddings: int = 32768
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "max_position_embeddings",
        ):
            check(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        heads, kv_heads, dim = self.num_heads, self.num_kv_heads, self.head_dim
        divides = kv_heads >= 1 and heads % kv_heads == 0
        check(divides, "num_kv_heads", kv_heads, f"a divisor of num_heads ({heads})")
        check(dim >= 2 and dim % 2 == 0, "head_dim", dim, "an even number, at least 2")
        windows = self.sliding_windows
        if windows:
            allowed = f"one positive integer or None for each of the {self.num_layers} layers"
            right = len(windows) == self.num_layers and all(_is_window(w) for w in windows)
            check(right, "sliding_windows", windows, allowed)
            check(None in windows, "sliding_windows", windows, "None in one layer at least")

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head (G = H / K)."""
        return self.num_heads // self.num_kv_heads

    @property
    def full_layers(self) -> tuple[int, ...]:
        """The layers that attend to everything, for whose drafts keys are chosen."""
        windows = self.sliding_windows or (None,) * self.num_layers
        return tuple(i for i, window in enumerate(windows) if window is None)

    def window(self, layer: int) -> int | None:
        """How many of the last positions the layer attends to; None is all."""
        return self.sliding_windows[layer] if self.sliding_windows else None


def _is_window(value: Any) -> bool:
    return value is None or (type(value) is int and value >= 1)
