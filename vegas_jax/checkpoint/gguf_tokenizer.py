"""The tokenizer in a GGUF file's metadata, built as the tokenizer.json that it was made from.

GGUF keeps tokens, kinds and merges (or scores), but of the way in which text is cut before merging
only a name, `tokenizer.ggml.pre`. The patterns here are those of the models' own tokenizer.json.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from vegas_jax.errors import CheckpointError

Metadata = Mapping[str, Any]

# Kinds of token, as the GGUF specification numbers them.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_PREFIX = "tokenizer.ggml."
_SPACE = "\u2581"  # SentencePiece's

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
# o200k's words end where a lower-case letter is followed by a capital one
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)
_MARKS_OR_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_MARKS}|{_TAIL}"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|{_TAIL}"
_O200K = (
    rf"{_CASED[0]}{_CONTRACTION}?|{_CASED[1]}{_CONTRACTION}?|\p{{N}}{{1,3}}|{_MARKS_OR_SLASH}|"
    + _TAIL
)
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_MARKS_OR_SLASH}|{_TAIL}"


@dataclasses.dataclass(frozen=True)
class _Pre:
    """How text is cut: by each pattern in turn, and into tokens without merging if there is one."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False  # when the file does not say
    normalizer: normalizers.Normalizer | None = None


_PRES = {
    # llama.cpp's own choice, for files that do not know better
    "default": _Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _Pre((_GPT2,)),
    "smollm": _Pre((r"\p{N}", _GPT2)),
    "qwen2": _Pre((_QWEN2,), normalizer=normalizers.NFC()),
    "llama-bpe": _Pre((_LLAMA3,), ignore_merges=True, add_bos=True),
    "gpt-4o": _Pre((_O200K,)),
    "tekken": _Pre((_TEKKEN,), ignore_merges=True, add_bos=True),
}


def read_tokenizer(metadata: Metadata, path: Path) -> Tokenizer | None:
    """The tokenizer that the file describes, or None where it has no vocabulary.

    Special tokens are those of kind control; tokens of kind unused, which pad the vocabulary, are
    left out. Encoding with special tokens adds BOS and EOS where the model expects them.

    Raises:
      CheckpointError: another model than gpt2 (byte-level BPE) and llama (SentencePiece's BPE), an
        unknown `pre`, or a vocabulary that does not hold together.
    """
    model = metadata.get(f"{_PREFIX}model", "none")
    if model in ("none", "no_vocab"):
        return None
    texts, kinds = tokens(metadata, path), types(metadata, path)
    vocabulary = {text: i for i, text in enumerate(texts) if kinds[i] != UNUSED}
    if len(vocabulary) != len(texts) - kinds.count(UNUSED):
        twice = next(text for i, text in enumerate(texts) if vocabulary.get(text, i) != i)
        raise CheckpointError(f"{path} has the token {twice!r} twice in {_PREFIX}tokens")
    try:
        if model == "gpt2":
            tokenizer, add_bos = _byte_level(metadata, vocabulary, path)
        elif model == "llama":
            tokenizer, add_bos = _sentence_piece(metadata, vocabulary, texts, kinds, path)
        else:
            raise CheckpointError(
                f"{path} has {_PREFIX}model {model!r}, but must have 'gpt2' or 'llama'"
            )
        _add_tokens(tokenizer, texts, kinds)
        _add_template(tokenizer, metadata, add_bos, path)
    except CheckpointError:
        raise
    except Exception as error:  # tokenizers raises nothing narrower
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path} has a tokenizer that cannot be built: {reason}") from error
    return tokenizer


def tokens(metadata: Metadata, path: Path) -> list[str]:
    """Every token as the file spells it, byte-level ones in GPT-2's alphabet; possibly none."""
    value = metadata.get(f"{_PREFIX}tokens", [])
    if not all(isinstance(text, str) for text in value):
        raise CheckpointError(f"{path} has {_PREFIX}tokens that are not all texts")
    return value


def types(metadata: Metadata, path: Path) -> list[int]:
    """The kind of every token; all are normal where the file does not say."""
    count = len(tokens(metadata, path))
    value = metadata.get(f"{_PREFIX}token_type", [NORMAL] * count)
    if len(value) != count:
        raise CheckpointError(
            f"{path} has {len(value)} values in {_PREFIX}token_type, but must have one for each "
            f"of its {count} tokens"
        )
    return value


def token_id(metadata: Metadata, name: str, path: Path) -> int | None:
    """The id of a special token, such as `bos`, or None; if there is a vocabulary, it is in it."""
    value = metadata.get(f"{_PREFIX}{name}_token_id")
    count = len(tokens(metadata, path))
    if value is not None and (type(value) is not int or (count and not 0 <= value < count)):
        raise CheckpointError(
            f"{path} has {_PREFIX}{name}_token_id {value!r}, but must have one of its {count} "
            "tokens"
        )
    return value


def token_text(metadata: Metadata, name: str, path: Path) -> str | None:
    """The text of a special token, such as `bos`, or None."""
    index, texts = token_id(metadata, name, path), tokens(metadata, path)
    return texts[index] if index is not None and texts else None


def _byte_level(
    metadata: Metadata, vocabulary: dict[str, int], path: Path
) -> tuple[Tokenizer, bool]:
    name = metadata.get(f"{_PREFIX}pre")
    if name not in _PRES:
        raise CheckpointError(
            f"{path} has {_PREFIX}pre {name!r}, but must have one of {', '.join(_PRES)}"
        )
    pre = _PRES[name]
    merges = [tuple(merge.split(" ")) for merge in metadata.get(f"{_PREFIX}merges", [])]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre.ignore_merges))
    if pre.normalizer is not None:
        tokenizer.normalizer = pre.normalizer
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def _sentence_piece(
    metadata: Metadata,
    vocabulary: dict[str, int],
    texts: Sequence[str],
    kinds: Sequence[int],
    path: Path,
) -> tuple[Tokenizer, bool]:
    """SentencePiece's BPE, as Llama 2 and Mistral 7B use it: unknown characters become bytes."""
    if metadata.get(f"{_PREFIX}remove_extra_whitespaces", False):
        raise CheckpointError(
            f"{path} has {_PREFIX}remove_extra_whitespaces true, but must have false"
        )
    scores = metadata.get(f"{_PREFIX}scores", [])
    if len(scores) != len(texts):
        raise CheckpointError(
            f"{path} has {len(scores)} values in {_PREFIX}scores, but must have one for each of "
            f"its {len(texts)} tokens"
        )
    merges = _merges(vocabulary, scores, kinds)
    unknown = token_text(metadata, "unknown", path)
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    has_prefix = metadata.get(f"{_PREFIX}add_space_prefix", True)
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        spaces.insert(0, normalizers.Prepend(_SPACE))
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, True


def _merges(
    vocabulary: Mapping[str, int], scores: Sequence[float], kinds: Sequence[int]
) -> list[tuple[str, str]]:
    """Every way in which two tokens make a third, that with the highest score first."""
    found = []
    for text, index in vocabulary.items():
        if kinds[index] == NORMAL:
            for cut in range(1, len(text)):
                left, right = text[:cut], text[cut:]
                if left in vocabulary and right in vocabulary:
                    found.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _add_tokens(tokenizer: Tokenizer, texts: Sequence[str], kinds: Sequence[int]) -> None:
    """Makes tokens whole wherever a text spells them; they have their ids already."""
    for text, kind in zip(texts, kinds, strict=True):
        if kind in (CONTROL, UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(text, normalized=False)])


def _add_template(tokenizer: Tokenizer, metadata: Metadata, add_bos: bool, path: Path) -> None:
    template, special = ["$A"], []
    for name, wanted, place in (("bos", add_bos, 0), ("eos", False, 2)):
        index, text = token_id(metadata, name, path), token_text(metadata, name, path)
        if metadata.get(f"{_PREFIX}add_{name}_token", wanted) and text is not None:
            template.insert(place, text)
            special.append((text, index))
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join(template), special_tokens=special
        )
