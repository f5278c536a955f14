"""The inverse of `vegas_jax.checkpoint.layout`: a parameter as the tensors that it is on the hub.

Names and layouts are those of the published checkpoints: per-expert matrices in Qwen3-MoE, gate and
up interleaved in gpt-oss, whose experts stay MXFP4 if they are packed.
"""

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from vegas_jax.checkpoint.layout import HEAD, Leaf, plan
from vegas_jax.checkpoint.tensors import Shape
from vegas_jax.model.config import ModelConfig

# Leaves that are not transposed.
_AS_STORED = ("embed", "scale", "sinks", "_bias", "_blocks", "_scales")


def hub_plan(config: ModelConfig) -> dict[str, Leaf]:
    """Every parameter by its path, with the tensors' names on the hub."""
    names: set[str] = set()
    if config.moe is not None and config.moe.packed:
        names = {
            f"layers.{layer}.mlp.experts.{name}_proj_blocks"
            for layer in config.moe.layers
            for name in ("gate_up", "down")
        }
    return {
        path: dataclasses.replace(
            leaf, sources={_hub_name(name): shape for name, shape in leaf.sources.items()}
        )
        for path, leaf in plan(config, names).items()
    }


def split(
    path: str, leaf: np.ndarray, sources: Mapping[str, Shape], config: ModelConfig
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors that make up a parameter, in the order of `sources`; views where possible.

    Args:
      path: of the parameter.
      leaf: its value.
      sources: the tensors' names and shapes.
      config: the model's.
    """
    if config.moe is not None and config.moe.biases and "/gate_up" in path:
        leaf = _interleave(leaf, axis=2 if path.endswith("gate_up") else 1)
    if path.endswith(_AS_STORED):
        sizes = [shape[-1] for shape in sources.values()]
        parts = np.split(leaf, np.cumsum(sizes)[:-1], axis=-1) if len(sizes) > 1 else [leaf]
        yield from zip(sources, parts, strict=True)
    elif all(len(shape) == 3 for shape in sources.values()):  # gpt-oss, stored (in, out)
        yield from zip(sources, [leaf], strict=True)
    else:
        yield from _matrices(leaf[None] if leaf.ndim == 2 else leaf, sources)


def _matrices(leaf: np.ndarray, sources: Mapping[str, Shape]) -> Iterator[tuple[str, np.ndarray]]:
    """[X, in, out ...] as (out, in) matrices, expert by expert."""
    expert, start = 0, 0
    for name, (outputs, _) in sources.items():
        yield name, leaf[expert, :, start : start + outputs].T
        start += outputs
        if start == leaf.shape[2]:
            expert, start = expert + 1, 0


def _interleave(leaf: np.ndarray, axis: int) -> np.ndarray:
    """gate, gate, ..., up, up, ... of an axis as gate, up, gate, up, ..."""
    order = np.arange(leaf.shape[axis]).reshape(2, -1).T.reshape(-1)
    return leaf.take(order, axis)


def _hub_name(name: str) -> str:
    return name if name == HEAD else f"model.{name}"
