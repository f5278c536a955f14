"""Reading fields of a JSON object, each fault one sentence that names file, field and value."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from vegas_jax.errors import CheckpointError, shorten

_LONGEST_VALUE = 203  # characters, in a sentence


@dataclasses.dataclass(frozen=True)
class Fields:
    """A JSON object and the file that it is from."""

    values: dict[str, Any]
    path: Path

    @classmethod
    def read(cls, path: Path) -> "Fields":
        """Raises CheckpointError unless the file holds a JSON object."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
        if not isinstance(raw, dict):
            kind = type(raw).__name__
            raise CheckpointError(f"{path} holds a JSON {kind}, but must hold an object")
        return cls(raw, path)

    def get(self, key: str, default: Any = None) -> Any:
        """The value, unchecked; `default` for an absent one and null."""
        value = self.values.get(key)
        return default if value is None else value

    def integer(
        self,
        key: str,
        default: int | None = None,
        least: int = -(2**31),
        most: int = 2**31 - 1,
    ) -> int:
        """An integer from `least` to `most`."""
        value = self._required(key, default)
        if type(value) is not int:
            raise self.wrong(key, "an integer")
        if value > most:
            raise self.wrong(key, f"at most {most}")
        if value < least:
            raise self.wrong(key, f"at least {least}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._required(key, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.wrong(key, "a positive number")
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """true or false."""
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def integers(self, key: str) -> list[int]:
        """A list of integers; an absent one is empty."""
        value = self.get(key, [])
        if not isinstance(value, list) or not all(type(i) is int for i in value):
            raise self.wrong(key, "a list of integers")
        return value

    def objects(self, key: str) -> "Fields":
        """An object's own fields; an absent one has none."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, "an object or null")
        return Fields(value, self.path)

    def require(self, key: str, *allowed: Any) -> None:
        """Raises CheckpointError unless the field is absent or has one of the values."""
        value = self.values.get(key)
        if value is not None and value not in allowed:
            choices = " or ".join([*map(json.dumps, allowed), "absent"])
            raise self.wrong(key, choices)

    def wrong(self, key: str, allowed: str) -> CheckpointError:
        """The sentence about a field."""
        value = json.dumps(self.values.get(key))
        shown = shorten(value, _LONGEST_VALUE)
        return CheckpointError(f"{self.path}: {key} is {shown}, but must be {allowed}")

    def _required(self, key: str, default: Any) -> Any:
        if key not in self.values and default is None:
            raise CheckpointError(f"{self.path} lacks the key {key}")
        return self.values.get(key, default)
