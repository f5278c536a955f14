"""Makes the files that the model is compared with: logits and greedy tokens of transformers.

Run by hand, in an environment of its own (torch is no dependency of this project):

    python3.11 -m venv /tmp/vgold
    /tmp/vgold/bin/pip install torch==2.13.0 transformers==5.17.0 safetensors
    /tmp/vgold/bin/python -m tests.goldens.make_goldens [name ...]

Without names, everything is made. It is computed on the CPU in float32, with attention and experts
written out in plain torch ("eager"); seeds are fixed.

`<name>/` is a random checkpoint of two to six layers, one for each model and layout of weights that
the library reads. checkpoints.py says what is in each, quantization.py how quantised weights are
stored; of those the goldens are what the dequantised weights give in float32, without quantising
activations. Beside it lies `golden.npz`. Prompts are drawn at random, of lengths 1, 129 and 400,
and some also of 127 and 128 (a window, and a whole number of a library's blocks). For each length
n:

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
import sys

import numpy as np
import tokenizers
import torch
import transformers
from safetensors.torch import load_file

from tests.goldens.checkpoints import CHECKPOINTS, make_checkpoint
from tests.goldens.quantization import dequantize

GOLDENS = pathlib.Path(__file__).parent
CODELM = GOLDENS.parents[1] / "vegas_jax" / "assets" / "codelm-16m"
NEW_TOKENS = 32

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
    """Writes the goldens named on the command line, or every one, next to this file."""
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    known = [*CHECKPOINTS, CODELM.name]
    names = sys.argv[1:] or known
    if unknown := set(names).difference(known):
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    for name in names:
        if name == CODELM.name:
            make_codelm_golden()
        else:
            make_checkpoint(CHECKPOINTS[name], GOLDENS / name)
            make_golden(name)


def make_golden(name: str) -> None:
    """Writes `<name>/golden.npz`."""
    checkpoint = CHECKPOINTS[name]
    folder = GOLDENS / name
    model = load(folder)
    generator = torch.Generator().manual_seed(1000 + checkpoint.seed)
    arrays = {}
    for n in checkpoint.lengths:
        prompt = torch.randint(model.config.vocab_size, (n,), generator=generator)
        positions = kept_positions(n)
        tokens, gaps = greedy(model, prompt)
        arrays[f"prompt_{n}"] = prompt.numpy().astype(np.int32)
        arrays[f"positions_{n}"] = positions
        arrays[f"logits_{n}"] = logits(model, prompt)[positions].numpy()
        arrays[f"greedy_{n}"] = tokens
        arrays[f"greedy_gaps_{n}"] = gaps
        describe(f"{name} n={n}", model, prompt, tokens, gaps)
    np.savez_compressed(folder / "golden.npz", **arrays)
    size = sum(path.stat().st_size for path in folder.iterdir())
    varied = min(len(set(arrays[f"greedy_{n}"].tolist())) for n in checkpoint.lengths)
    nearest = min(arrays[f"greedy_gaps_{n}"].min() for n in checkpoint.lengths)
    print(
        f"{name}: {size / 1e3:.0f} kB, at least {varied} distinct greedy tokens, "
        f"smallest gap {nearest:.4f}"
    )


def make_codelm_golden() -> None:
    """Writes `codelm-16m.npz`."""
    model = load(CODELM)
    tokenizer = tokenizers.Tokenizer.from_file(str(CODELM / "tokenizer.json"))
    prompt = torch.tensor(tokenizer.encode(CODE).ids)
    positions = np.arange(len(prompt) - 4, len(prompt), dtype=np.int32)
    rows = logits(model, prompt)[positions]
    top = rows.topk(64)
    tokens, gaps = greedy(model, prompt)
    describe(f"codelm-16m n={len(prompt)}", model, prompt, tokens, gaps)
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


def load(folder: pathlib.Path) -> transformers.PreTrainedModel:
    """The checkpoint in float32, attention and experts written out in plain torch."""
    config = transformers.AutoConfig.from_pretrained(folder)
    plain = {
        "dtype": torch.float32,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
    }
    if hasattr(config, "quantization_config"):
        # transformers would round the weights to bfloat16, and takes 200 rows in two blocks of 128
        # for blocks of 100.
        del config.quantization_config
        model = transformers.AutoModelForCausalLM.from_config(config, **plain)
        model.load_state_dict(dequantize(load_file(folder / "model.safetensors")))
    else:
        model, problems = transformers.AutoModelForCausalLM.from_pretrained(
            folder, **plain, output_loading_info=True
        )
        if any(problems.values()):
            sys.exit(f"{folder.name} does not fit the model: {problems}")
    return model.eval()


def kept_positions(n: int) -> np.ndarray:
    """The last four positions, and the first, the middle and both sides of a quarter."""
    chosen = {0, n // 4, n // 4 + 1, n // 2, *range(n - 4, n)}
    return np.array(sorted(p for p in chosen if 0 <= p < n), np.int32)


@torch.no_grad()
def logits(model: transformers.PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """[n, V] logits of one sequence, computed in one pass without a cache."""
    return model(tokens[None], use_cache=False).logits[0]


def greedy(
    model: transformers.PreTrainedModel, prompt: torch.Tensor
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
    title: str,
    model: transformers.PreTrainedModel,
    prompt: torch.Tensor,
    tokens: np.ndarray,
    gaps: np.ndarray,
) -> None:
    """Prints how sharp the attention is, how varied the logits are, and the nearest tie."""
    output = model(prompt[None], use_cache=False, output_attentions=True)
    sharpness = [layer[0, :, -1].max(-1).values.mean().item() for layer in output.attentions]
    shares = ", ".join(f"{share:.2f}" for share in sharpness)
    print(
        f"{title}: largest attention weight {shares}; logits' deviation "
        f"{output.logits[0, -1].std():.2f}; {len(set(tokens.tolist()))} distinct greedy tokens; "
        f"smallest gap {gaps.min():.4f}"
    )


if __name__ == "__main__":
    main()
