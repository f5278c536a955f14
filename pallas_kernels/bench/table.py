"""A GitHub table that is printed row by row, aligned in a terminal too."""

from collections.abc import Sequence


class Table:
    """Prints its head at once.

    Attributes:
      widths: of the columns, in characters.
    """

    def __init__(self, columns: dict[str, int]) -> None:
        self.widths = [max(len(name), width) for name, width in columns.items()]
        self.row(list(columns))
        print("|" + "|".join("-" * (width + 2) for width in self.widths) + "|", flush=True)

    def row(self, cells: Sequence[str]) -> None:
        """Prints a row."""
        padded = (cell.ljust(width) for cell, width in zip(cells, self.widths, strict=True))
        print("| " + " | ".join(padded) + " |", flush=True)
