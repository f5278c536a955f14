"""Checkpoints: where one lies, what its config says, and its weights as the model's parameters."""

from vegas_jax.checkpoint.hf_config import read_config
from vegas_jax.checkpoint.huggingface import SHIPPED, Params, read_params, resolve
from vegas_jax.checkpoint.loading import load, load_chat_template

__all__ = [
    "SHIPPED",
    "Params",
    "load",
    "load_chat_template",
    "read_config",
    "read_params",
    "resolve",
]
