"""Long real texts that every machine has: modules of Python's standard library.

The shipped checkpoint was not trained on these, so acceptance measured on them is honest.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

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
        text = path.read_text(encoding="utf-8")
        ids += tokenizer.encode(f"# file: {path.parent.name}/{path.name}\n{text}\n")
        if len(ids) >= length * count:
            return [ids[i * length : (i + 1) * length] for i in range(count)]
    raise ValueError(f"count is {count}, but there are only {len(ids) // length} texts of {length}")
