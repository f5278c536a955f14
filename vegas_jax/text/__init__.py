"""Text: to tokens and back, piece by piece, and where a stop string ends it."""

from vegas_jax.text.detokenizer import Detokenizer
from vegas_jax.text.stop import StopChecker
from vegas_jax.text.tokenizer import Tokenizer, load

__all__ = ["Detokenizer", "StopChecker", "Tokenizer", "load"]
