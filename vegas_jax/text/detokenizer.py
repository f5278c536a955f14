"""Text from tokens, one token at a time.

The text of a token depends on its neighbours: a character may be spread over several tokens, and
SentencePiece drops the space that begins a text. So a short window of the latest tokens is decoded
anew for each token, and the text beyond what was returned before is new. The window begins where no
character is split, and keeps some returned text before the new text.
"""

from vegas_jax.text.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"  # what the unfinished character at the end of a text decodes to
_MAX_WINDOW = 12  # tokens after which a window is cut though its last character is unfinished


class Detokenizer:
    """Decodes incrementally, in amortised constant time a token.

    The pieces that `add` and the final `flush` return, joined, are what `tokenizer.decode` gives
    for all tokens.

    Attributes:
      heading: text of no token, to be shown after what `add` returned; subclasses set it.
    """

    heading = ""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._returned = 0  # characters of the window's text that were returned
        self._boundary = 0  # tokens of the window before the latest place that splits no character

    def add(self, token_id: int) -> str:
        """Takes the next token; returns the text that it finishes, perhaps none."""
        if self._tokenizer.is_silent(token_id):
            return ""
        self._window.append(token_id)
        if self._tokenizer.is_byte(token_id):
            return ""  # the run of bytes has no text before it ends
        text = self._tokenizer.decode(self._window)
        finished = text.removesuffix(_INCOMPLETE)
        piece = finished[self._returned :]
        self._returned += len(piece)
        if finished == text:
            if piece:
                self._drop(self._boundary)
                self._boundary = len(self._window)
        elif len(self._window) > _MAX_WINDOW:
            self._cut(text)
        return piece

    def flush(self) -> str:
        """Returns the text held back, with U+FFFD for an unfinished character, and starts anew."""
        piece = self._tokenizer.decode(self._window)[self._returned :]
        self._window, self._returned, self._boundary = [], 0, 0
        return piece

    def _drop(self, count: int) -> None:
        """Drops the first tokens of a window whose whole text was returned."""
        if count:
            self._window = self._window[count:]
            self._returned = len(self._tokenizer.decode(self._window))

    def _cut(self, text: str) -> None:
        """Keeps only the last token of a window in which broken characters follow each other.

        Two parts that decode to the same text apart as together split no character. The last token
        is such a part unless it continues a character, which three in a row can do at most.
        """
        before = self._tokenizer.decode(self._window[:-1])
        after = self._tokenizer.decode(self._window[-1:])
        if after and before + after == text:
            self._window = self._window[-1:]
            self._returned -= len(before)
            self._boundary = 0
