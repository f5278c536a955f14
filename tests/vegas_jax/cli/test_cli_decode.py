import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from vegas_jax.cli import main, records
from vegas_jax.config import SamplingParams, SpecConfig
from vegas_jax.errors import NonFiniteLogitsError

ROOT = Path(main.__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_prompts(folder, count):
    lines = [json.dumps({"id": f"p{i}", "text": "x" * (i + 1)}) for i in range(count)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def read_records(path="out.jsonl"):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


# --- running


def test_text_goes_to_stdout_and_the_rest_to_stderr(engine, capsys):
    assert main.main(["--prompt=a", "--max_new_tokens=6", "--seed=9"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "<9>abc\n"
    assert "tokens/s" in captured.err
    assert "\x1b" not in captured.err
    assert engine.loads == [("codelm-16m", None, "auto")]
    assert engine.generators[-1] == (SpecConfig(), 7, 1)
    assert len(engine.warmups) == 1


def test_settings_reach_the_engine(engine):
    arguments = ["--prompt=aaa", "--prompt=b", "--batch_size=8", "--dtype=bfloat16"]
    arguments += ["--kernels=xla", "--max_len=50", "--top_k=3", "--max_new_tokens=4"]
    assert main.main(arguments) == 0
    assert engine.loads == [("codelm-16m", "bfloat16", "xla")]
    assert engine.generators[-1] == (SpecConfig(), 50, 2)
    _, prompts, sampling = engine.runs[-1]
    assert prompts == [[97, 97, 97], [98]]
    assert sampling == SamplingParams(top_k=3, max_new_tokens=4)


def test_texts_come_in_the_order_of_the_prompts(engine, capsys):
    engine.reverse = True
    arguments = ["--prompt=a", "--prompt=b", "--seed=1,2", "--max_new_tokens=4", "--batch_size=2"]
    assert main.main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.out == "<1>a\n<2>a\n"
    assert captured.err.index("--- prompt-0") < captured.err.index("--- prompt-1")


def test_the_last_tokens_of_a_long_prompt_are_kept(engine, capsys):
    assert main.main(["--prompt=abcdef", "--prompt=g", "--max_prompt_tokens=2"]) == 0
    assert engine.runs[-1][1] == [[101, 102], [103]]
    assert "kept the last 2 tokens of 1 of 2 prompts" in capsys.readouterr().err


def test_a_checkpoint_without_tokenizer_prints_ids(engine, capsys, folder):
    engine.tokenizer = None
    (folder / "ids.jsonl").write_text('{"text": [5, 6]}\n')
    for mode in ([], ["--stream"]):
        arguments = ["--prompt_file=ids.jsonl", "--max_new_tokens=2", *mode]
        assert main.main(arguments) == 0
        assert capsys.readouterr().out.split()[0] == str(ord("<"))


def test_zero_new_tokens(engine, capsys):
    assert main.main(["--prompt=a", "--max_new_tokens=0"]) == 0
    assert capsys.readouterr().out == ""


# --- records


def test_records_have_the_promised_fields(engine, folder):
    write_prompts(folder, 2)
    arguments = ["--prompt_file=prompts.jsonl", "--output=new/out.jsonl", "--max_new_tokens=8"]
    assert main.main([*arguments, "--logprobs"]) == 0
    first = read_records("new/out.jsonl")[0]
    assert list(first) == [
        "id",
        "prompt_tokens",
        "text",
        "token_ids",
        "finish_reason",
        "logprobs",
        "stats",
        "settings",
    ]
    assert list(first["stats"]) == [
        "rounds",
        "drafted",
        "accepted",
        "emitted",
        "mean_acceptance_length",
        "acceptance_by_position",
        "prefill_s",
        "decode_s",
        "tokens_per_second",
    ]
    assert (first["id"], first["prompt_tokens"], first["text"]) == ("p0", 1, "<0>abcde")
    assert len(first["logprobs"]) == len(first["token_ids"]) == first["stats"]["emitted"] == 8
    assert first["settings"]["max_new_tokens"] == 8


def test_output_leaves_stdout_empty(engine, folder, capsys):
    assert main.main(["--prompt=a", "--output=out.jsonl"]) == 0
    assert capsys.readouterr().out == ""
    assert "logprobs" not in read_records()[0]


@pytest.mark.parametrize("mode", [[], ["--stream"]])
def test_an_interrupted_run_goes_on_where_it_stopped(engine, folder, capsys, mode, monkeypatch):
    write_prompts(folder, 4)
    arguments = ["--prompt_file=prompts.jsonl", "--output=out.jsonl", "--max_new_tokens=4", *mode]
    append = records.append

    def stop_at_the_third(path, record):
        if record["id"] == "p2":
            raise KeyboardInterrupt
        append(path, record)

    with monkeypatch.context() as patch:
        patch.setattr(records, "append", stop_at_the_third)
        assert main.main(arguments) == 130
    last = "interrupted: 2 of 4 prompts are done and in out.jsonl; run the same command again"
    assert capsys.readouterr().err.splitlines()[-1].startswith(last)
    with Path("out.jsonl").open("a") as file:
        file.write('{"id": "p2", "tex')  # what a crash in mid-write leaves

    engine.runs.clear()
    assert main.main(arguments) == 0
    assert "2 of 4 prompts are in --output already" in capsys.readouterr().err
    assert [ids for _, prompts, _ in engine.runs for ids in prompts] == [[120] * 3, [120] * 4]
    assert [r["id"] for r in read_records()] == ["p0", "p1", "p2", "p3"]

    engine.loads.clear()
    assert main.main(arguments) == 0  # nothing left to do: no checkpoint is loaded
    assert not engine.loads


def test_resumed_prompts_keep_their_own_seeds(engine, folder):
    write_prompts(folder, 3)
    arguments = ["--prompt_file=prompts.jsonl", "--output=out.jsonl", "--seed=7,8,9"]
    assert main.main(arguments) == 0
    lines = Path("out.jsonl").read_text().splitlines(keepends=True)
    Path("out.jsonl").write_text(lines[1])
    assert main.main(arguments) == 0
    texts = {r["id"]: r["text"][:3] for r in read_records()}
    assert texts == {"p0": "<7>", "p1": "<8>", "p2": "<9>"}
    assert engine.runs[-1][2].seed == (7, 9)


def test_resuming_with_other_settings_or_prompts_is_refused(engine, folder, capsys):
    write_prompts(folder, 2)
    arguments = ["--prompt_file=prompts.jsonl", "--output=out.jsonl"]
    assert main.main(arguments) == 0
    before = Path("out.jsonl").read_bytes()
    for change in ["--temperature=0.5", "--method=dense", "--checkpoint=x", "--dtype=float32"]:
        assert main.main([*arguments, change]) == 2
        assert change[2:].split("=")[0] in capsys.readouterr().err
    assert main.main([*arguments, "--max_len=900", "--batch_size=2"]) == 0  # decide nothing
    (folder / "prompts.jsonl").write_text('{"id": "p0", "text": "edited"}\n')
    assert main.main(arguments) == 2
    assert "another prompt" in capsys.readouterr().err
    assert Path("out.jsonl").read_bytes() == before


# --- streaming


def test_streaming_into_a_pipe_is_plain_text(engine, capsys):
    assert main.main(["--prompt=a", "--prompt=b", "--stream", "--max_new_tokens=5"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "<0>ab\n<0>ab\n"
    assert "accepted draft" not in captured.err


def test_streaming_on_a_terminal_has_colours_and_a_legend(engine, terminal):
    out, err = terminal()
    engine.answer = "a\x1bb"
    assert main.main(["--prompt=a", "--stream"]) == 0
    assert "\x1b[32m" in out.getvalue()
    assert "\x1b[1;4;33m" in out.getvalue()
    assert "\u241b" in out.getvalue()
    assert "corrected by full attention" in err.getvalue()
    assert "100 100 0 0 0 0" in err.getvalue()


def test_text_on_a_terminal_takes_turns_with_the_bar(engine, terminal):
    out, err = terminal()
    assert main.main(["--prompt=a", "--prompt=b", "--max_new_tokens=5"]) == 0
    assert out.getvalue() == "<0>ab\n<0>ab\n"
    assert "prompts" in err.getvalue()


def test_ctrl_c_in_mid_stream_ends_the_line(engine, capsys):
    engine.fail_after, engine.error = 2, KeyboardInterrupt()
    assert main.main(["--prompt=a", "--stream"]) == 130
    captured = capsys.readouterr()
    assert captured.out == "<0\n"
    assert captured.err.splitlines()[-1] == "interrupted: 0 of 1 prompts are done"


def test_ctrl_c_before_decoding(monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "read_prompts", interrupt)
    assert main.main(["--prompt=a"]) == 130
    assert len(capsys.readouterr().err.splitlines()) == 1


# --- comparison with plain


def test_compare_plain_says_the_speed_up_and_that_tokens_are_equal(engine, capsys):
    arguments = ["--prompt=a", "--prompt=b", "--compare_plain", "--max_new_tokens=7"]
    assert main.main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 2  # the plain texts are not printed again
    assert [spec.method for spec, _, _ in engine.runs] == ["vegas", "plain"]
    assert "vegas decodes 2.00x the tokens per second of plain" in captured.err
    assert "tokens: equal to plain's for 2 of 2 prompts" in captured.err
    rows = [line.split()[0] for line in captured.err.splitlines() if line.split()]
    assert "vegas" in rows
    assert "plain" in rows


@pytest.mark.parametrize("mode", [[], ["--stream"]])
def test_compare_plain_says_where_tokens_differ(engine, capsys, mode):
    engine.plain_answer = "abX"
    assert main.main(["--prompt=a", "--compare_plain", "--max_new_tokens=8", *mode]) == 0
    error = capsys.readouterr().err
    assert "equal to plain's for 0 of 1 prompts" in error
    assert "first difference: prompt-0 at token 5" in error


def test_compare_plain_expects_no_equal_tokens_of_rejection_sampling(engine, capsys):
    engine.plain_answer = "abX"
    arguments = ["--prompt=a", "--compare_plain", "--temperature=0.8"]
    assert main.main(arguments) == 0
    assert "equality is not expected" in capsys.readouterr().err
    assert main.main([*arguments, "--acceptance=coupled"]) == 0
    error = capsys.readouterr().err
    assert "not expected" not in error
    assert "first difference" in error


# --- trace, pipes


def test_trace_covers_the_decoding_only(engine, monkeypatch, folder):
    traced = []

    @contextlib.contextmanager
    def trace(path, create_perfetto_trace):
        assert create_perfetto_trace
        before = len(engine.runs)
        yield
        traced.append((Path(path), len(engine.runs) - before, len(engine.warmups)))

    monkeypatch.setattr(jax.profiler, "trace", trace)
    assert main.main(["--prompt=a", "--trace=profile/x", "--compare_plain"]) == 0
    assert traced == [(Path("profile/x"), 1, 1)]
    assert (folder / "profile" / "x").is_dir()


def test_a_reader_that_goes_away_ends_the_run_quietly():
    """A real process, because only that has a real pipe."""
    code = "import sys; from vegas_jax.cli.main import main; sys.exit(main(['--help']))"
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=write,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            check=False,
            timeout=60,
        )
    finally:
        os.close(write)
    assert done.returncode == 141
    assert done.stderr == b""


@pytest.mark.parametrize("mode", [[], ["--stream"]])
def test_non_finite_logits_keep_what_was_written(engine, capsys, folder, mode):
    write_prompts(folder, 3)
    engine.fail_after, engine.error = 1, NonFiniteLogitsError("logits of position 5 are not finite")
    assert main.main(["--prompt_file=prompts.jsonl", "--output=out.jsonl", *mode]) == 2
    assert "error: logits of position 5" in capsys.readouterr().err
    assert len(read_records()) == (0 if mode else 1)


def test_prompts_that_do_not_fit_are_refused_before_any_runs(engine, capsys, folder):
    write_prompts(folder, 3)
    arguments = ["--prompt_file=prompts.jsonl", "--max_len=12", "--max_new_tokens=10", "--stream"]
    assert main.main(arguments) == 2
    assert "prompt 'p2' has 3 tokens" in capsys.readouterr().err
    assert not engine.runs
