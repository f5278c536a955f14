"""Long real texts that every machine has: modules of Python's standard library.

The shipped checkpoint was not trained on these, so acceptance measured on them is honest.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from vegas_jax.errors import InputError
from vegas_jax.text.tokenizer import Tokenizer

HELD_OUT = ("asyncio", "zipfile", "argparse", "tarfile", "typing")


def files() -> Iterator[Path]:
    """Source files of the held-out modules, in a fixed order."""
    for module in HELD_OUT:
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        origin = Path(spec.origin)
        yield from sorted(origin.parent.rglob("*.py")) if origin.name == "__init__.py" else [origin]


def documents(tokenizer: Tokenizer, length: int, count: int) -> list[list[int]]:
    """`count` disjoint texts of `length` tokens each, as token ids."""
    ids: list[int] = []
    for path in files():
        ids += _encode(tokenizer, path)
        if len(ids) >= length * count:
            return [ids[i * length : (i + 1) * length] for i in range(count)]
    raise InputError(f"count is {count}, but there are only {len(ids) // length} texts of {length}")


def windows(tokenizer: Tokenizer, length: int, count: int) -> list[list[int]]:
    """`count` texts of `length` tokens that end at different places, and overlap if they must."""
    ids = [token for path in files() for token in _encode(tokenizer, path)]
    if len(ids) < length:
        raise InputError(f"length is {length}, but all texts together have {len(ids)} tokens")
    starts = [i * (len(ids) - length) // max(count - 1, 1) for i in range(count)]
    return [ids[start : start + length] for start in starts]


def _encode(tokenizer: Tokenizer, path: Path) -> list[int]:
    text = path.read_text(encoding="utf-8")
    return tokenizer.encode(f"# file: {path.parent.name}/{path.name}\n{text}\n")
