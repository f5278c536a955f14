"""A checkpoint's tokenizer, as `tokenizer.json` describes it."""

import re
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from vegas_jax.errors import CheckpointError, InputError

TOKENIZER_FILE = "tokenizer.json"

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """Encodes whole prompts and decodes whole outputs; `Detokenizer` decodes token by token."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's vocabulary may be larger."""
        return self._tokenizer.get_vocab_size()

    @property
    def prefix(self) -> list[int]:
        """What the post-processor puts before every text, such as a BOS; mostly nothing."""
        encoding = self._tokenizer.encode("a")
        added = [sequence is None for sequence in encoding.sequence_ids]
        return encoding.ids[: added.index(False)] if False in added else []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The text's tokens, never truncated or padded; possibly none.

        Args:
          text: special tokens written out in it are recognised.
          add_special_tokens: add what the tokenizer's post-processor says, such as a first BOS; a
            chat template has written them already.

        Raises:
          InputError: the text has a lone surrogate, which is no character.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"the prompt has a lone surrogate at character {error.start}, but must be text "
                "that UTF-8 can encode"
            ) from error
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text that the tokens spell, without special tokens; U+FFFD for broken UTF-8."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def special_token(self, text: str) -> int | None:
        """The id of the special token that is written so; None if there is none."""
        token_id: int | None = self._tokenizer.token_to_id(text)
        return token_id if token_id in self._special else None

    def is_silent(self, token_id: int) -> bool:
        """Whether `decode` leaves the token out: it is special, or not in the vocabulary."""
        return token_id in self._special or self._tokenizer.id_to_token(token_id) is None

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is a single byte (SentencePiece's byte fallback, such as `<0xE2>`).

        A run of them is decoded as a whole: one bad byte turns each of them into U+FFFD.
        """
        token = self._tokenizer.id_to_token(token_id)
        return token is not None and _BYTE_TOKEN.fullmatch(token) is not None


def load(folder: str | Path) -> Tokenizer | None:
    """Reads `folder`'s tokenizer.json; None when it has none, and then only tokens go in and out.

    Raises:
      CheckpointError: the file cannot be read as a tokenizer.
    """
    path = Path(folder) / TOKENIZER_FILE
    if not path.exists():
        return None
    try:
        return Tokenizer(tokenizers.Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path} cannot be read as a tokenizer: {error}") from error
