"""What people see: text on stdout, and everything else (bar, notes, table) on stderr.

Model text is never read as markup, and its control characters never reach a terminal. A pipe gets
the text exactly as it is.
"""

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text

from vegas_jax.cli.summary import Totals
from vegas_jax.completion import Kind

# Bold and underline tell corrected tokens from drafted ones where there is no colour.
STYLES = {
    Kind.FIRST: Style.null(),
    Kind.ACCEPTED: Style.parse("green"),
    Kind.CORRECTED: Style.parse("bold underline yellow"),
    Kind.BONUS: Style.null(),
}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_WIDTH_OF_A_FILE = 120  # columns, where stderr is no terminal that could say


def visible(text: str) -> str:
    """The text with control characters other than newline and tab replaced by visible signs.

    The carriage return of a CRLF is dropped. C1 controls count too: 0x9b begins an escape sequence.
    """

    def sign(match: re.Match[str]) -> str:
        code = ord(match[0])
        return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"

    return _CONTROL.sub(sign, text.replace("\r\n", "\n"))


def say_error(message: str) -> None:
    """One line for an error, without a traceback."""
    print(f"error: {visible(message)}", file=sys.stderr)


class Stdout:
    """Writes model text: coloured and made harmless on a terminal, as it is into a pipe.

    Nothing at all if `quiet`.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self.is_terminal = sys.stdout.isatty()
        self._console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
        self._at_line_start = True

    def write(self, text: str, kind: Kind = Kind.FIRST) -> None:
        """Writes a piece of text at once; the kind decides its style."""
        if not text or self._quiet:
            return
        if self.is_terminal:
            # Segments go out as they are: no wrapping, no tab stops counted from the piece's start.
            piece = Segment(visible(text), STYLES[kind])
            self._console.print(Segments([piece]), soft_wrap=True)
        else:
            sys.stdout.write(_encodable(text))
        sys.stdout.flush()
        self._at_line_start = text.endswith("\n")

    def end_line(self) -> None:
        """Ends the line, unless it has just been ended."""
        if not self._at_line_start:
            self.write("\n")


class Stderr:
    """Notes, the progress bar and the closing table; nothing at all if `quiet`."""

    def __init__(self, quiet: bool = False) -> None:
        is_terminal = sys.stderr.isatty() and not quiet
        self._console = Console(
            file=sys.stderr,
            force_terminal=None if is_terminal else False,
            width=None if is_terminal else _WIDTH_OF_A_FILE,
            quiet=quiet,
            highlight=False,
            markup=False,
            emoji=False,
        )
        self._is_terminal = is_terminal

    def note(self, text: str) -> None:
        """A line about what is going on."""
        self._console.print(Text(visible(text), style="dim"), soft_wrap=True)

    def legend(self) -> None:
        """Explains the styles of streamed text."""
        self._console.print(
            Text.assemble(
                ("accepted draft", STYLES[Kind.ACCEPTED]),
                "  ",
                ("corrected by full attention", STYLES[Kind.CORRECTED]),
                "  no mark: drawn by full attention with no draft to judge",
            ),
            soft_wrap=True,
        )

    @contextlib.contextmanager
    def bar(self, label: str, prompts: int, max_new_tokens: int | None) -> Iterator["Bar"]:
        """A progress bar over the tokens of all prompts, where stderr is a terminal."""
        progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[status]}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            redirect_stdout=False,  # it would send the text to stderr
            redirect_stderr=False,
            disable=not self._is_terminal,
        )
        tokens = None if max_new_tokens is None else prompts * max_new_tokens
        task = progress.add_task(label, total=tokens, status="")
        # Older versions of rich print an empty line when even a disabled bar stops.
        with progress if self._is_terminal else contextlib.nullcontext():
            yield Bar(progress, task, prompts, max_new_tokens)

    @contextlib.contextmanager
    def share(self, label: str) -> Iterator[Callable[[float], None]]:
        """A progress bar that is told the share that is done, where stderr is a terminal."""
        progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not self._is_terminal,
        )
        task = progress.add_task(visible(label), total=1.0)
        with progress if self._is_terminal else contextlib.nullcontext():
            yield lambda done: progress.update(task, completed=done)

    def table(self, rows: Sequence[tuple[str, Totals]]) -> None:
        """The closing table: one row for each method that ran."""
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        table.add_column("method")
        for name in (
            "prompts",
            "tokens",
            "prefill s",
            "decode s",
            "tokens/s",
            "mean acceptance length",
            "accepted / drafted",
        ):
            table.add_column(name, justify="right")
        for method, totals in rows:
            table.add_row(method, *_cells(totals))
        self._console.print(table)
        # Up to 64 numbers would burst the table.
        for method, totals in rows:
            if totals.acceptance_by_position:
                shares = " ".join(f"{100 * share:.0f}" for share in totals.acceptance_by_position)
                self._console.print(Text(f"{method}: % accepted by draft position: {shares}"))


class Bar:
    """Counts tokens and finished prompts on a progress bar."""

    def __init__(
        self, progress: Progress, task: TaskID, prompts: int, max_new_tokens: int | None
    ) -> None:
        self._progress = progress
        self._task = task
        self._prompts = prompts
        self._max_new_tokens = max_new_tokens
        self._total = None if max_new_tokens is None else prompts * max_new_tokens
        self._tokens = 0
        self._done = 0
        self._start: tuple[float, int] | None = None

    def add_tokens(self, count: int) -> None:
        """Counts newly emitted tokens."""
        now = time.perf_counter()
        self._tokens += count
        # The clock starts with the first tokens, so that the speed shown leaves out the prefill.
        self._start = self._start or (now, self._tokens)
        elapsed, tokens = now - self._start[0], self._tokens - self._start[1]
        speed = f", {tokens / elapsed:.0f} tokens/s" if tokens and elapsed > 0 else ""
        status = f"{self._done}/{self._prompts} prompts, {self._tokens} tokens{speed}"
        self._progress.update(self._task, completed=self._tokens, status=status)

    def finish_prompt(self, emitted: int) -> None:
        """Counts a finished prompt; one that stopped early leaves less to do."""
        self._done += 1
        if self._total is not None and self._max_new_tokens is not None:
            self._total -= max(self._max_new_tokens - emitted, 0)
            self._progress.update(self._task, total=max(self._total, self._tokens))

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Takes the bar off the screen while something else is printed."""
        if self._progress.disable:
            yield
            return
        self._progress.stop()
        try:
            yield
        finally:
            self._progress.start()


def silence_stdout() -> None:
    """After a broken pipe: lets the interpreter's last flush go nowhere instead of failing."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _cells(totals: Totals) -> tuple[str, ...]:
    drafted = bool(totals.acceptance_by_position)
    return (
        str(totals.prompts),
        str(totals.tokens),
        f"{totals.prefill_s:.2f}",
        f"{totals.decode_s:.2f}",
        f"{totals.tokens_per_second:.1f}",
        f"{totals.mean_acceptance_length:.2f}",
        f"{totals.accepted}/{totals.drafted}" if drafted else "-",
    )


def _encodable(text: str) -> str:
    """The text without characters that stdout's encoding lacks (a C locale has ASCII only)."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)
