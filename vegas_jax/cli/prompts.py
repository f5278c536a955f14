"""Reading prompts: from the command line, text files, JSONL files and globs."""

import dataclasses
import glob
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vegas_jax.errors import InputError
from vegas_jax.text import check_messages

JOINED_ID = "joined-files"
_MESSAGES = "messages"
_BOM = b"\xef\xbb\xbf"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt with the id that its record carries.

    `content` is a text, a tuple of token ids, or a list of a chat's messages.
    """

    id: str
    content: str | tuple[int, ...] | list[dict[str, Any]]

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that tell one content from another."""
        return hashlib.sha256(json.dumps(self.content).encode()).hexdigest()[:16]


def read_prompts(
    texts: Sequence[str],
    patterns: Sequence[str],
    *,
    field: str = "text",
    join_files: bool = False,
    chat: bool = False,
) -> list[Prompt]:
    """All prompts, in order: `texts` (prompt-0, prompt-1, ...), then what the patterns match.

    Args:
      texts: prompts as given.
      patterns: paths, globs (`**` descends), or several separated by commas.
      field: where a JSONL line has its prompt.
      join_files: all text files become one prompt, each under a line `# file: <path>` (the shipped
        checkpoint saw its training files under such lines).
      chat: a JSONL line may have `messages` instead of the field.

    Raises:
      InputError: nothing given, nothing matched, a file that cannot be read or is malformed, an
        empty prompt, or an id that occurs twice.
    """
    if not texts and not patterns:
        raise InputError("there is no prompt: give --prompt or --prompt_file")
    if join_files and not patterns:
        raise InputError("--join_files needs --prompt_file")
    prompts = [_checked_text(i, text) for i, text in enumerate(texts)]
    paths = _expand(patterns)
    if join_files:
        prompts.append(_joined(paths))
    else:
        prompts.extend(prompt for path in paths for prompt in _read_file(path, field, chat))
    _check_prompts(prompts, patterns)
    return prompts


def _checked_text(index: int, text: str) -> Prompt:
    if has_surrogates(text):  # how Python spells argument bytes that are not UTF-8
        raise InputError(f"prompt 'prompt-{index}' is not valid UTF-8")
    return Prompt(f"prompt-{index}", text)


def _expand(patterns: Sequence[str]) -> list[str]:
    """Paths in the order of the patterns, sorted within each; a repeated path counts once."""
    paths: dict[str, None] = {}
    for pattern in patterns:
        # A path may itself hold a comma, or a character that a glob would interpret.
        parts = [pattern] if os.path.lexists(pattern) else pattern.split(",")
        for part in filter(None, (part.strip() for part in parts)):
            paths.update(dict.fromkeys(_matches(part)))
    return list(paths)


def _matches(pattern: str) -> list[str]:
    if os.path.lexists(pattern):
        return [pattern]
    if not glob.has_magic(pattern):
        raise InputError(f"--prompt_file: there is no file {pattern!r} (in {os.getcwd()})")
    found = sorted(p for p in glob.glob(pattern, recursive=True) if not os.path.isdir(p))
    if not found:
        raise InputError(f"--prompt_file: no file matches {pattern!r} (in {os.getcwd()})")
    return found


def _read_file(path: str, field: str, chat: bool) -> Iterator[Prompt]:
    text = _read_text(path)
    if not path.endswith(".jsonl"):
        yield Prompt(_name(path), text)
        return
    # Only "\n" ends a line of JSONL: a string may hold U+2028 and its like as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _parse_line(line, f"{_name(path)}:{number}", field, chat)


def _parse_line(line: str, place: str, field: str, chat: bool) -> Prompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or str(error)
        raise InputError(f"{place} is not valid JSON: {reason}") from None
    if not isinstance(record, dict):
        raise InputError(f"{place} is not a JSON object")
    if chat and _MESSAGES in record:
        if field != _MESSAGES and field in record:
            raise InputError(f"{place} has both {_MESSAGES!r} and {field!r}: leave one out")
        return Prompt(_record_id(record, place), _messages(record[_MESSAGES], place))
    if field not in record:
        names, reads = "--prompt_field names the field to use", "--chat reads its messages"
        hint = reads if _MESSAGES in record else names
        raise InputError(f"{place} has no field {field!r} ({hint})")
    return Prompt(_record_id(record, place), _content(record[field], place, field))


def _record_id(record: dict[str, Any], place: str) -> str:
    if "id" not in record:
        return place
    value = record["id"]
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InputError(f"{place} has the id {value!r}, but it must be a string or an integer")
    if has_surrogates(str(value)):
        raise InputError(f"{place} has half a surrogate pair in its id")
    return str(value)


def _content(value: Any, place: str, field: str) -> str | tuple[int, ...]:
    if isinstance(value, str):
        if has_surrogates(value):
            raise InputError(f"{place} has half a surrogate pair in its field {field!r}")
        return value
    if isinstance(value, list) and all(type(token) is int and token >= 0 for token in value):
        return tuple(value)
    raise InputError(f"the field {field!r} of {place} must be a string or a list of token ids")


def _messages(value: Any, place: str) -> list[dict[str, Any]]:
    try:
        check_messages(value)
    except InputError as error:
        raise InputError(f"{place}: {error}") from None
    if has_surrogates(json.dumps(value, ensure_ascii=False)):
        raise InputError(f"{place} has half a surrogate pair in its messages")
    return list(value)


def _joined(paths: Sequence[str]) -> Prompt:
    parts = []
    for path in paths:
        if path.endswith(".jsonl"):
            raise InputError(f"--join_files joins text files, but {_name(path)!r} is JSONL")
        text = _read_text(path)
        if text:
            end = "" if text.endswith("\n") else "\n"
            parts.append(f"# file: {Path(_name(path)).as_posix()}\n{text}{end}")
    return Prompt(JOINED_ID, "".join(parts))


def _read_text(path: str) -> str:
    """The file's text, with its line ends as they are and without a byte order mark."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {_name(path)!r}: {error.strerror or error}") from None
    start = len(_BOM) if data.startswith(_BOM) else 0
    try:
        return data[start:].decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{_name(path)!r} is not UTF-8: bad byte at offset {start + error.start}"
        ) from None


def _check_prompts(prompts: Sequence[Prompt], patterns: Sequence[str]) -> None:
    if not prompts:
        raise InputError(f"--prompt_file: there is no prompt in {', '.join(patterns)}")
    seen = set()
    for prompt in prompts:
        if not prompt.content:
            raise InputError(f"prompt {prompt.id!r} is empty")
        if prompt.id in seen:
            raise InputError(f"the id {prompt.id!r} occurs twice among the prompts")
        seen.add(prompt.id)


def _name(path: str) -> str:
    """The path as text: bytes that are not UTF-8 become a replacement character."""
    return os.fsencode(path).decode("utf-8", "replace")


def has_surrogates(text: str) -> bool:
    """Whether the text has halves of surrogate pairs, which are no characters."""
    return any("\ud800" <= character <= "\udfff" for character in text)
