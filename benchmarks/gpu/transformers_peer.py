"""A peer: plain decoding by transformers, static cache, compiled, at Qwen3-8B's size.

A program of its own, `python -m benchmarks.gpu.transformers_peer 8x32768`, since two frameworks
would want the same GPU memory; it needs torch and transformers. Weights and cache are random, so
that it tells a step's time and nothing else. The last line is JSON.
"""

import json
import statistics
import sys
import time
from typing import Any

SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
STEPS = 16


def step_seconds(batch: int, rows: int, shape: dict[str, int], device: str, mode: str) -> float:
    """Seconds of a step with a cache that is full but for the steps that are timed."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, StaticCache

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = Qwen3Config(**shape, max_position_embeddings=rows, attn_implementation="sdpa")
    with torch.device(device), torch.inference_mode():
        model = Qwen3ForCausalLM(config).eval()
        cache = StaticCache(config=config, max_cache_len=rows)
        cache.early_initialization(
            batch, config.num_key_value_heads, config.head_dim, torch.bfloat16, device
        )
        warm_up = 4
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
            layer.cumulative_length.fill_(rows - (STEPS + 1) * 5 - warm_up)
        forward = torch.compile(model.forward, mode=mode) if mode else model.forward
        tokens = torch.ones((batch, 1), dtype=torch.long)

        def step() -> Any:
            return forward(input_ids=tokens, past_key_values=cache, use_cache=True).logits

        def wait() -> None:
            if device == "cuda":
                torch.cuda.synchronize()

        for _ in range(warm_up):
            step()
        wait()
        found = []
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(STEPS):
                step()
            wait()
            found.append((time.perf_counter() - began) / STEPS)
        return statistics.median(found)


def main() -> None:
    """Prints a JSON object: seconds of a step by shape, and the versions."""
    import torch
    import transformers

    found: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    for name in sys.argv[1:]:
        batch, rows = map(int, name.split("x"))
        try:
            found[name] = step_seconds(batch, rows, SHAPE, "cuda", "reduce-overhead")
        except Exception as error:  # out of memory, above all; the other shapes still count
            found[name] = f"{type(error).__name__}: {error}"[:200]
        torch.cuda.empty_cache()
        torch.compiler.reset()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
