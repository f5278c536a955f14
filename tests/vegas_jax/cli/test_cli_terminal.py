import re
import sys

import pytest

from vegas_jax.cli.summary import first_differences, total
from vegas_jax.cli.terminal import Stderr, Stdout, visible
from vegas_jax.completion import Completion, Kind, Stats

F, A, C, B = Kind.FIRST, Kind.ACCEPTED, Kind.CORRECTED, Kind.BONUS


def completion(kinds, decode_s=1.0, prefill_s=0.5, num_drafts=3):
    return Completion(
        prompt_tokens=4,
        text="",
        token_ids=tuple(range(len(kinds))),
        kinds=tuple(kinds),
        logprobs=None,
        finish_reason="length",
        stats=Stats.from_kinds(kinds, num_drafts, prefill_s=prefill_s, decode_s=decode_s),
    )


def test_visible_replaces_controls_only():
    assert visible("a\tb\nc\r\nd") == "a\tb\nc\nd"
    assert visible("\x1b[31m\x07\r\x7f\x9b") == "\u241b[31m\u2407\u240d\u2421\ufffd"


def test_a_terminal_gets_colour_a_mark_and_no_escape_of_the_models(terminal):
    out, _ = terminal()
    stdout = Stdout()
    stdout.write("[bold]x\x1b[2J\tand :smile:", Kind.ACCEPTED)
    stdout.write("fix", Kind.CORRECTED)
    text = out.getvalue()
    assert "[bold]x\u241b[2J\tand :smile:" in text
    assert "\x1b[32m" in text
    assert re.search(r"\x1b\[1;4;33mfix\x1b\[0m", text)


def test_marks_remain_without_colour(terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    out, _ = terminal()
    stdout = Stdout()
    stdout.write("ok", Kind.ACCEPTED)
    stdout.write("fix", Kind.CORRECTED)
    assert out.getvalue() == "ok\x1b[1;4mfix\x1b[0m"


def test_long_text_is_not_wrapped_on_a_terminal(terminal):
    out, _ = terminal()
    Stdout().write("word " * 100)
    assert out.getvalue() == "word " * 100


def test_a_pipe_gets_the_text_itself(capsys):
    stdout = Stdout()
    stdout.write("[red]\x1b[2J\r\n", Kind.CORRECTED)
    stdout.end_line()
    stdout.write("x")
    stdout.end_line()
    assert capsys.readouterr().out == "[red]\x1b[2J\r\nx\n"


def test_ascii_stdout_does_not_fail(tmp_path, monkeypatch):
    with (tmp_path / "out").open("w", encoding="ascii") as file:
        monkeypatch.setattr(sys, "stdout", file)
        Stdout().write("caf\u00e9")
    assert (tmp_path / "out").read_bytes() == b"caf?"


def test_totals_add_up_and_weigh_positions_by_rounds():
    one = completion([F, A, A, C, C])  # rounds of 2 accepted and of none
    other = completion([F, A, A, A, B, A])  # a whole round, and one cut after a draft
    totals = total([one, other], wall_s=3.0)
    assert (totals.prompts, totals.tokens) == (2, 11)
    assert (totals.drafted, totals.accepted) == (10, 6)
    assert totals.mean_acceptance_length == pytest.approx(9 / 4)
    assert totals.acceptance_by_position == pytest.approx((3 / 4, 2 / 3, 1 / 3))
    assert (totals.prefill_s, totals.decode_s) == (1.0, 2.0)
    assert totals.tokens_per_second == pytest.approx(9 / 2)


@pytest.mark.parametrize(("wall", "decode"), [(2.5, 1.5), (99.0, 2.0), (0.0, 1.0)])
def test_the_decode_time_of_a_batch_is_not_added_up(wall, decode):
    assert total([completion([F, B]), completion([F, B])], wall).decode_s == decode


def test_nothing_decoded_gives_zeros():
    totals = total([completion([], decode_s=0.0, prefill_s=0.0)], 0.0)
    assert (totals.tokens_per_second, totals.mean_acceptance_length) == (0.0, 0.0)


def test_first_differences():
    a, b = completion([F, B, B]), completion([F, B])
    assert first_differences([a, a], [a, b]) == [(1, 2)]
    assert first_differences([b, a], [a, a]) == [(0, 2)]


def test_bar(terminal):
    _, err = terminal()
    stderr = Stderr()
    with stderr.bar("vegas", 2, 8) as bar:
        bar.add_tokens(3)
        bar.add_tokens(2)
        bar.finish_prompt(5)
        with bar.hidden():
            pass
        bar.add_tokens(1)
    assert "1/2 prompts, 6 tokens" in err.getvalue()


def test_no_bar_into_a_file_and_a_table_with_every_figure(capsys):
    stderr = Stderr()
    with stderr.bar("vegas", 1, None) as bar:
        bar.add_tokens(3)
        bar.finish_prompt(3)
    assert capsys.readouterr().err == ""
    totals = total([completion([F, A, A, C, C])], 1.5)
    stderr.table([("vegas", totals), ("plain", total([completion([F, B], num_drafts=0)], 1.5))])
    text = capsys.readouterr().err
    assert "\x1b" not in text
    rows = [line.split() for line in text.splitlines()]
    assert ["vegas", "1", "5", "0.50", "1.00", "4.0", "2.00", "2/6"] in rows
    assert ["plain", "1", "2", "0.50", "1.00", "1.0", "1.00", "-"] in rows
    assert "vegas: % accepted by draft position: 50 50 0" in text
