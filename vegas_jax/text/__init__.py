"""Text: chats to text, text to tokens and back, piece by piece, and where a stop string ends it."""

from vegas_jax.text.channels import ChannelDetokenizer, Channels, has_channels
from vegas_jax.text.chat import ChatTemplate, check_messages
from vegas_jax.text.detokenizer import Detokenizer
from vegas_jax.text.stop import StopChecker
from vegas_jax.text.tokenizer import Tokenizer, load

__all__ = [
    "ChannelDetokenizer",
    "Channels",
    "ChatTemplate",
    "Detokenizer",
    "StopChecker",
    "Tokenizer",
    "check_messages",
    "has_channels",
    "load",
]
