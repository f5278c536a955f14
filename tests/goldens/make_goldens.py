"""Makes the files that the model is compared with: logits and greedy tokens of transformers.

Run by hand, in an environment of its own (torch is no dependency of this project):

    python3.11 -m venv /tmp/vgold
    /tmp/vgold/bin/pip install torch==2.13.0 transformers==5.17.0 safetensors
    /tmp/vgold/bin/python tests/goldens/make_goldens.py

Everything is computed on the CPU in float32 with eager attention; seeds are fixed.

`<name>/` is a random checkpoint of two or three layers as `save_pretrained` writes it, with
`golden.npz`. Prompts are drawn at random, of lengths 1, 127, 128, 129 and 400. For each length n:

    prompt_{n}          int32 [n]      the prompt's tokens
    positions_{n}       int32 [P]      positions whose logits are kept, ascending: the last four
                                       and up to four earlier ones
    logits_{n}          float32 [P, V] logits after the token at each of them
    greedy_{n}          int32 [32]     greedy continuation, not stopped by any token
    greedy_gaps_{n}     float32 [32]   best less second-best logit where each was chosen

`codelm-16m.npz` is the same for the shipped checkpoint (bfloat16 weights, computed in float32) on
a piece of Python text:

    text                str []         the prompt
    prompt              int32 [n]      its tokens, as tokenizer.json encodes it
    positions           int32 [4]      the last four positions
    top_ids             int32 [4, 64]  the 64 likeliest tokens after each, likeliest first
    top_logits          float32 [4, 64]  their logits
    logsumexp           float32 [4]    log of the sum of exp(logits) over the whole vocabulary
    greedy              int32 [32]     greedy continuation, not stopped by any token
    greedy_gaps         float32 [32]   best less second-best logit where each was chosen
"""

import pathlib

import numpy as np
import tokenizers
import torch
import transformers

GOLDENS = pathlib.Path(__file__).parent
CODELM = GOLDENS.parents[1] / "vegas_jax" / "assets" / "codelm-16m"
PROMPT_LENGTHS = (1, 127, 128, 129, 400)
NEW_TOKENS = 32

COMMON = {
    "vocab_size": 256,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "bos_token_id": None,
    "pad_token_id": None,
}
CHECKPOINTS = {
    # Grouped queries, and num_heads * head_dim != hidden_size.
    "qwen3-tied": {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "eos_token_id": 7,
    },
    # Weights stored in bfloat16, four query heads to a KV head, another rope_theta.
    "qwen3-untied": {
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
    # One query head to a KV head, in several shards.
    "qwen3-mha": {
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
}
STORED_DTYPE = {"qwen3-untied": torch.bfloat16}
SHARD_SIZE = {"qwen3-mha": "64KB"}

CODE = '''"""Shopping baskets and what they cost."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Item:
    """One line of a basket."""

    name: str
    price: float
    quantity: int = 1

    def total(self) -> float:
        """Price of the whole line."""
        return self.price * self.quantity


@dataclass
class Basket:
    """Items that a customer has chosen."""

    items: list[Item] = field(default_factory=list)

    def add(self, item: Item) -> None:
        """Adds an item to the basket."""
        if item.quantity < 1:
            raise ValueError(f"quantity must be at least 1, not {item.quantity}")
        self.items.append(item)

    def total(self, discount: float = 0.0) -> float:
        """Sum of all items, less the discount."""
        amount = sum(item.total() for item in self.items)
        return amount * (1.0 - discount)

    def cheapest(self) -> Item | None:
        """The item with the lowest price, or None when the basket is empty."""
        return min(self.items, key=lambda item: item.price, default=None)

    def remove(self, name: str) -> None:
        """Removes every item of that name."""
        self.items ='''


def main() -> None:
    """Writes every golden next to this file."""
    torch.use_deterministic_algorithms(True)
    for seed, (name, changes) in enumerate(CHECKPOINTS.items()):
        make_checkpoint(name, {**COMMON, **changes}, seed)
        make_golden(name, seed)
    make_codelm_golden()


def make_checkpoint(name: str, settings: dict, seed: int) -> None:
    """Saves a random checkpoint whose attention is sharp and whose logits differ."""
    rope = {"rope_type": "default", "rope_theta": settings.pop("rope_theta")}
    config = transformers.Qwen3Config(**settings, rope_parameters=rope)
    model = transformers.Qwen3ForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            weight.copy_(random_weight(key, weight.shape, generator))
    model.to(STORED_DTYPE.get(name, torch.float32))
    model.save_pretrained(GOLDENS / name, max_shard_size=SHARD_SIZE.get(name, "5GB"))


def random_weight(key: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Norms around 1 (around 2 for q and k, for sharp attention), matrices that keep the scale."""
    noise = torch.randn(shape, generator=generator)
    if key.endswith(("q_norm.weight", "k_norm.weight")):
        return 2.0 + 0.3 * noise
    if key.endswith("norm.weight"):
        return 1.0 + 0.2 * noise
    if "embed_tokens" in key:
        return 0.5 * noise
    return 1.5 * noise / shape[-1] ** 0.5


def make_golden(name: str, seed: int) -> None:
    """Writes `<name>/golden.npz`."""
    model = load(GOLDENS / name)
    generator = torch.Generator().manual_seed(1000 + seed)
    arrays = {}
    for n in PROMPT_LENGTHS:
        prompt = torch.randint(model.config.vocab_size, (n,), generator=generator)
        positions = kept_positions(n)
        tokens, gaps = greedy(model, prompt)
        arrays[f"prompt_{n}"] = prompt.numpy().astype(np.int32)
        arrays[f"positions_{n}"] = positions
        arrays[f"logits_{n}"] = logits(model, prompt)[positions].numpy()
        arrays[f"greedy_{n}"] = tokens
        arrays[f"greedy_gaps_{n}"] = gaps
        describe(f"{name} n={n}", model, prompt, gaps)
    np.savez_compressed(GOLDENS / name / "golden.npz", **arrays)


def make_codelm_golden() -> None:
    """Writes `codelm-16m.npz`."""
    model = load(CODELM)
    tokenizer = tokenizers.Tokenizer.from_file(str(CODELM / "tokenizer.json"))
    prompt = torch.tensor(tokenizer.encode(CODE).ids)
    positions = np.arange(len(prompt) - 4, len(prompt), dtype=np.int32)
    rows = logits(model, prompt)[positions]
    top = rows.topk(64)
    tokens, gaps = greedy(model, prompt)
    describe(f"codelm-16m n={len(prompt)}", model, prompt, gaps)
    print(tokenizer.decode(tokens))
    np.savez_compressed(
        GOLDENS / "codelm-16m.npz",
        text=np.array(CODE),
        prompt=prompt.numpy().astype(np.int32),
        positions=positions,
        top_ids=top.indices.numpy().astype(np.int32),
        top_logits=top.values.numpy(),
        logsumexp=rows.logsumexp(-1).numpy(),
        greedy=tokens,
        greedy_gaps=gaps,
    )


def load(folder: pathlib.Path) -> transformers.Qwen3ForCausalLM:
    """The checkpoint in float32 with the attention that is written out in plain torch."""
    model = transformers.Qwen3ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def kept_positions(n: int) -> np.ndarray:
    """The last four positions, and the first, the middle and both sides of a quarter."""
    chosen = {0, n // 4, n // 4 + 1, n // 2, *range(n - 4, n)}
    return np.array(sorted(p for p in chosen if 0 <= p < n), np.int32)


@torch.no_grad()
def logits(model: transformers.Qwen3ForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """[n, V] logits of one sequence, computed in one pass without a cache."""
    return model(tokens[None], use_cache=False).logits[0]


def greedy(
    model: transformers.Qwen3ForCausalLM, prompt: torch.Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """Greedy continuation and top-2 logit gaps, the whole sequence computed anew each step."""
    tokens, gaps = prompt, []
    for _ in range(NEW_TOKENS):
        best = logits(model, tokens)[-1].topk(2)
        gaps.append(best.values[0] - best.values[1])
        tokens = torch.cat([tokens, best.indices[:1]])
    return tokens[len(prompt) :].numpy().astype(np.int32), torch.stack(gaps).numpy()


@torch.no_grad()
def describe(
    title: str, model: transformers.Qwen3ForCausalLM, prompt: torch.Tensor, gaps: np.ndarray
) -> None:
    """Prints how sharp the attention is, how varied the logits are, and the nearest tie."""
    output = model(prompt[None], use_cache=False, output_attentions=True)
    sharpness = [layer[0, :, -1].max(-1).values.mean().item() for layer in output.attentions]
    shares = ", ".join(f"{share:.2f}" for share in sharpness)
    print(
        f"{title}: largest attention weight {shares}; logits' deviation "
        f"{output.logits[0, -1].std():.2f}; smallest gap {gaps.min():.4f}"
    )


if __name__ == "__main__":
    main()
