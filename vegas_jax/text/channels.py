"""gpt-oss's channels: which of a reply's messages are shown, and under which heading.

A reply is a row of messages (OpenAI's harmony format, github.com/openai/harmony, docs/format.md):

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>

The markers are special tokens, which have no text: without care the names run into the messages.
"""

from typing import Literal

from vegas_jax.text.detokenizer import Detokenizer
from vegas_jax.text.tokenizer import Tokenizer

Channels = Literal["final", "all"]

_CHANNEL, _MESSAGE, _CONSTRAIN = "<|channel|>", "<|message|>", "<|constrain|>"
# The part of a message that each marker begins. What follows an end belongs to no channel.
_PARTS = {
    "<|start|>": "role",
    _CHANNEL: "channel",
    _MESSAGE: "text",
    "<|end|>": "text",
    "<|return|>": "text",
    "<|call|>": "text",
}


class ChannelDetokenizer(Detokenizer):
    """Decodes a reply incrementally, without its headers.

    `final` shows the messages of the channel final, `all` those of every channel, each under a
    heading line with its channel's name. Text that belongs to no channel is always shown.

    Args:
      tokenizer: one with channels, see `has_channels`.
      show: `final` or `all`.
    """

    def __init__(self, tokenizer: Tokenizer, show: Channels) -> None:
        super().__init__(tokenizer)
        self._all = show == "all"
        ids = {tokenizer.special_token(marker): marker for marker in (*_PARTS, _CONSTRAIN)}
        self._markers = {i: marker for i, marker in ids.items() if i is not None}
        self._part = "text"
        self._header = ""  # what followed <|channel|>: the name, perhaps a recipient and a format
        self._visible = True
        self._any_shown = False

    def add(self, token_id: int) -> str:
        """Takes the next token; returns the text to show that it finishes, perhaps none.

        Sets `heading` to what is to be shown after that.
        """
        self.heading = ""
        marker = self._markers.get(token_id)
        if marker is None:
            return self._take(super().add(token_id))
        rest = self._take(super().flush())
        if marker == _CONSTRAIN:
            self._header += " "
            return rest
        self._part = _PARTS[marker]
        if marker == _MESSAGE:
            self._begin_text()
        else:
            self._header, self._visible = "", True
        return rest

    def flush(self) -> str:
        """Returns the text held back that is to be shown, and starts anew."""
        rest = self._take(super().flush())
        self.heading, self._part, self._header = "", "text", ""
        self._visible, self._any_shown = True, False
        return rest

    def _begin_text(self) -> None:
        name = (self._header.split() or [""])[0]
        self._visible = self._all or name in ("", "final")
        if self._visible:
            gap = "\n\n" if self._any_shown else ""
            self.heading = gap + (f"{name}:\n" if name and self._all else "")
            self._any_shown |= bool(self.heading)

    def _take(self, piece: str) -> str:
        """Sorts text by the part that it belongs to; returns what is to be shown of it."""
        if self._part == "channel":
            self._header += piece
        if self._part != "text" or not self._visible:
            return ""
        self._any_shown |= bool(piece)
        return piece


def has_channels(tokenizer: Tokenizer) -> bool:
    """Whether replies may have channels: their markers are special tokens of the tokenizer."""
    return all(tokenizer.special_token(marker) is not None for marker in (_CHANNEL, _MESSAGE))


def make_detokenizer(tokenizer: Tokenizer, channels: Channels | None) -> Detokenizer:
    """What decodes a reply; a plain `Detokenizer` for None, or where there are no channels."""
    if channels is None or not has_channels(tokenizer):
        return Detokenizer(tokenizer)
    return ChannelDetokenizer(tokenizer, channels)
