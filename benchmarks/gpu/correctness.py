"""Do the models and the methods write the same tokens? Asked before anything is timed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.parts import compile_decode
from benchmarks.gpu.workload import Models, Workload
from vegas_jax import SpecConfig, logits

PLAIN = SpecConfig(method="plain")
COUPLED = SpecConfig(acceptance="coupled")


def check_float32(models: Models, rows: int, new_tokens: int) -> bool:
    """Prints whether tokens are equal where they must be; float32 models."""
    greedy = Workload(models, 2, rows, new_tokens, temperature=0.0)
    sampled = dataclasses.replace(greedy, temperature=0.8)
    same = {
        "greedy: the wide model's tokens are the small one's": (
            small_tokens(greedy),
            wide_tokens(greedy, PLAIN),
        ),
        "temperature 0.8, coupled: vegas' tokens are plain ones": (
            wide_tokens(sampled, PLAIN),
            wide_tokens(sampled, COUPLED),
        ),
    }
    right = True
    for what, (expected, found) in same.items():
        wrong = np.argwhere(expected != found)
        right &= not wrong.size
        verdict = f"NO, text {wrong[0][0]} from token {wrong[0][1]} on" if wrong.size else "yes"
        print(f"float32, 2 x {rows:,}, {new_tokens} tokens; {what}: {verdict}", flush=True)
    return right


def show_divergences(models: Models, exact: Models, rows: int, new_tokens: int) -> None:
    """Prints where greedy vegas leaves greedy plain decoding, and by how little plain chose.

    Args:
      models: of 16 bits, whose rounding depends on how many tokens are computed together.
      exact: the same in float32.
      rows: S.
      new_tokens: of the continuation.
    """
    work = Workload(models, 2, rows, new_tokens, temperature=0.0)
    plain, vegas = wide_tokens(work, PLAIN), wide_tokens(work, COUPLED)
    for i, text in enumerate(work.texts):
        where = f"{models.wide.dtype}, greedy, text {i}: "
        differs = np.flatnonzero(plain[i] != vegas[i])
        if not differs.size:
            print(f"{where}vegas' {new_tokens} tokens are plain ones", flush=True)
            continue
        first = int(differs[0])
        seen = jnp.array([[*text, *plain[i, :first].tolist()]], jnp.int32)
        size = jnp.array([seen.shape[1]], jnp.int32)
        best, second = jax.lax.top_k(logits(exact.small, exact.small_params, seen, size)[0, -1], 2)[
            0
        ]
        print(
            f"{where}first other token after {first} of {new_tokens}, where the two best logits "
            f"are {float(best - second):.4f} apart in float32",
            flush=True,
        )


def small_tokens(work: Workload) -> np.ndarray:
    """What the small model writes, [B, new_tokens]."""
    return np.asarray(work.decode_small(PLAIN).requests.tokens)[:, : work.new_tokens]


def wide_tokens(work: Workload, config: SpecConfig) -> np.ndarray:
    """What the wide model writes, [B, new_tokens]."""
    state = compile_decode(work, config)(work.begin_large(config), 2**31 - 1)
    return np.asarray(state.requests.tokens)[:, : work.new_tokens]
