"""The output file: one JSON record a line, and resuming an interrupted run by `id`.

A record carries the settings that it was made with, so that a file never mixes two kinds of results
unnoticed: rerunning with other settings, or with another prompt under a known id, is refused.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vegas_jax.completion import Completion
from vegas_jax.errors import InputError

# Settings that differ from record to record within one run.
_PER_PROMPT = ("seed", "prompt_sha256")
_RECORD_START = b'{"id": "'


def prepare(path: Path) -> None:
    """Makes the folder and sees that the file can be appended to; InputError if not."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise InputError(f"--output: {str(path)!r} is not a regular file")
        with path.open("ab"):
            pass
    except OSError as error:
        raise InputError(
            f"--output: cannot write to {str(path)!r}: {error.strerror or error}"
        ) from None


def resume(path: Path, wanted: Mapping[str, Mapping[str, Any]]) -> frozenset[str]:
    """The ids that need no work, after mending a last line that a crash cut off.

    Args:
      path: the output file; it may not exist yet.
      wanted: for each prompt's id, the settings that its record will carry.

    Returns:
      Those ids of `wanted` that the file has already.

    Raises:
      InputError: a line that is no record, or was made with other settings; nothing is changed.
    """
    if not path.is_file():
        return frozenset()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"--output: cannot read {str(path)!r}: {error.strerror or error}"
        ) from None
    expected = {name: json.loads(json.dumps(settings)) for name, settings in wanted.items()}
    done = set()
    whole = 0  # bytes of the file that are whole records
    lines = [line + b"\n" for line in data.split(b"\n")]
    lines[-1] = lines[-1][:-1]  # what follows the last line end
    lines = lines if lines[-1] else lines[:-1]
    for number, line in enumerate(lines, start=1):
        record = _parse(line)
        if record is None and number == len(lines) and _looks_cut(line):
            break
        if record is None:
            raise InputError(f"--output: line {number} of {str(path)!r} is not a record")
        _check_settings(record, expected, f"line {number} of {str(path)!r}")
        done.add(record["id"])
        whole += len(line)
    _mend(path, data, whole)
    return frozenset(done & wanted.keys())


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Adds a record and waits until the disk has it; InputError if it cannot be written."""
    line = json.dumps(record, ensure_ascii=False) + "\n"
    try:
        with path.open("ab") as file:
            file.write(line.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise InputError(
            f"--output: cannot write to {str(path)!r}: {error.strerror or error}"
        ) from None


def make_record(name: str, completion: Completion, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The record of one completion; `logprobs` is there when they were asked for."""
    record = {
        "id": name,
        "prompt_tokens": completion.prompt_tokens,
        "text": completion.text,
        "token_ids": list(map(int, completion.token_ids)),
        "finish_reason": completion.finish_reason,
    }
    if completion.logprobs is not None:
        record["logprobs"] = list(map(float, completion.logprobs))
    return record | {"stats": dataclasses.asdict(completion.stats), "settings": dict(settings)}


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = (
        isinstance(record, dict)
        and isinstance(record.get("id"), str)
        and isinstance(record.get("settings"), dict)
    )
    return record if whole else None


def _looks_cut(line: bytes) -> bool:
    """Whether a line is only the beginning of a record, so that dropping it loses no one's data.

    A file system may also leave zeros where the end of a line was to be.
    """
    with contextlib.suppress(ValueError):
        json.loads(line)
        return False  # whole, but no record of ours
    text = line.rstrip(b"\0\n")
    return text.startswith(_RECORD_START) or _RECORD_START.startswith(text)


def _check_settings(
    record: Mapping[str, Any], expected: Mapping[str, dict[str, Any]], place: str
) -> None:
    made = record["settings"]
    known = record["id"] in expected
    settings = expected[record["id"]] if known else next(iter(expected.values()))
    for name in sorted(settings.keys() | made.keys()):
        if name in _PER_PROMPT and not known:
            continue
        if made.get(name) == settings.get(name):
            continue
        if name == "prompt_sha256":
            raise InputError(
                f"--output: {place} has the id {record['id']!r}, but was made from another prompt"
            )
        raise InputError(
            f"--output: {place} was made with {name}={made.get(name)!r}, but this run has"
            f" {settings.get(name)!r}: give another file, or the same settings"
        )


def _mend(path: Path, data: bytes, whole: int) -> None:
    """Drops what follows the last whole record, and gives that record its line end."""
    kept = data[:whole]
    line_end = b"" if not kept or kept.endswith(b"\n") else b"\n"
    if whole == len(data) and not line_end:
        return
    with path.open("r+b") as file:
        file.truncate(whole)
        file.seek(whole)
        file.write(line_end)
        file.flush()
        os.fsync(file.fileno())
