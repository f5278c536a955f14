import dataclasses
import runpy
import sys
from pathlib import Path

import pytest

from vegas_jax.cli import flags, main
from vegas_jax.config import SamplingParams, SpecConfig
from vegas_jax.errors import CheckpointError

ROOT = Path(main.__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- flags


def test_defaults_are_those_of_the_dataclasses():
    values = flags.parse([])
    assert flags.spec_config(values) == SpecConfig()
    assert flags.sampling_params(values) == SamplingParams()


def test_every_setting_has_its_flag():
    texts = {
        "method": "streaming",
        "num_speculative_tokens": 3,
        "sparse_ratio": 0.5,
        "sparse_min_tokens": 4,
        "sparse_block_size": 1,
        "score_pool": "2,3",
        "score_mode": "logit",
        "score_rows": "all",
        "per_kv_head": "true",
        "acceptance": "coupled",
        "max_new_tokens": "none",
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "seed": "1,2",
        "stop": "b,c",
        "stop_token_ids": "4,5",
        "ignore_eos": "true",
        "logprobs": "true",
    }
    arguments = ["--stop=a", *(f"--{name}={text}" for name, text in texts.items())]
    values = flags.parse(arguments)
    spec, sampling = flags.spec_config(values), flags.sampling_params(values)
    assert (spec.score_pool, sampling.seed, sampling.stop) == ((2, 3), (1, 2), ("a", "b,c"))
    assert (sampling.max_new_tokens, sampling.stop_token_ids) == (None, (4, 5))
    for ours, default in ((spec, SpecConfig()), (sampling, SamplingParams())):
        for field in dataclasses.fields(default):
            assert getattr(ours, field.name) != getattr(default, field.name), field.name


def test_stop_escapes():
    assert flags.unescape(r"a\n\t\r\\n\x20\u00e9\d") == "a\n\t\r\\n \u00e9\\d"
    assert flags.sampling_params(flags.parse([r"--stop=\n\ndef"])).stop == ("\n\ndef",)


def test_the_shipped_flagfile_spells_the_quickstart():
    values = flags.parse([f"--flagfile={ROOT}/configs/quickstart.flags"])
    assert flags.sampling_params(values).temperature == 0.8
    assert values.join_files
    assert values.stream
    assert values.compare_plain
    assert values.max_prompt_tokens == 8192
    assert values.prompt_file == ["vegas_jax/**/*.py"]


def test_help(capsys, engine):
    assert main.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in flags.define():
        assert name in ("h", "help") or name in out
    assert "the LAST so many tokens" in out
    assert not engine.loads


def test_importing_twice_and_running_as_main(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["decode", "--help"])
    for _ in range(2):
        with pytest.raises(SystemExit) as end:
            runpy.run_module("vegas_jax.decode", run_name="__main__")
        assert end.value.code == 0
        assert "--checkpoint" in capsys.readouterr().out


# --- errors: exit code 2, one sentence, before the checkpoint is loaded


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --prompt or --prompt_file"),
        (["--nonsense"], "Unknown command line flag 'nonsense'"),
        (["--prompt=a", "stray"], "unexpected argument 'stray'"),
        (["--prompt=a", "--top_k=x"], "flag --top_k=x"),
        (["--prompt=a", "--method=x"], "flag --method=x"),
        (["--prompt=a", "--seed=1,x"], "must be integers separated by commas"),
        (["--prompt=a", "--max_new_tokens=x"], "must be an integer or none"),
        (["--prompt=a", "--batch_size=0"], "flag --batch_size=0"),
        (["--prompt=a", "--temperature=-1"], "temperature is -1.0"),
        (["--prompt=a", "--sparse_ratio=0"], "sparse_ratio is 0.0"),
        (["--prompt=a", "--num_speculative_tokens=0"], "num_speculative_tokens is 0"),
        (["--prompt=a", "--score_pool=1"], "score_pool is (1,)"),
        (["--prompt=a", "--stop="], "stop is ('',)"),
        (["--prompt=a", "--seed="], "--seed has 0 seeds for 1 prompts"),
        (["--prompt=a", "--seed=1,2"], "--seed has 2 seeds for 1 prompts"),
        (["--prompt=a", "--max_new_tokens=none"], "needs --max_len"),
        (["--prompt=a", "--method=plain", "--compare_plain"], "other than plain"),
        (["--prompt=a", "--stream", "--batch_size=2"], "--stream goes prompt by prompt"),
        (["--prompt="], "prompt 'prompt-0' is empty"),
        (["--prompt_file=*.none"], "no file matches '*.none'"),
        (["--prompt=a", "--output=file/out.jsonl"], "cannot write to 'file/out.jsonl'"),
        (["--prompt=a", "--output=."], "not a regular file"),
        (["--prompt=a", "--trace=file/x"], "--trace: cannot write to 'file/x'"),
        (["--flagfile=none.flags"], "Unable to open flagfile"),
        (["--flagfile=latin.flags"], "not UTF-8"),
    ],
)
def test_bad_input(engine, capsys, folder, arguments, message):
    (folder / "file").write_text("")
    (folder / "latin.flags").write_bytes(b"--prompt=\xff\n")
    assert main.main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("error: ")
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""
    assert not engine.loads


def test_a_bad_checkpoint(engine, capsys):
    engine.load_error = CheckpointError("there is no checkpoint 'x'")
    assert main.main(["--prompt=a", "--checkpoint=x"]) == 2
    assert capsys.readouterr().err == "error: there is no checkpoint 'x'\n"


def test_out_of_memory_is_a_sentence_and_other_faults_are_not_hidden(engine, capsys):
    engine.load_error = RuntimeError("RESOURCE_EXHAUSTED: out of memory allocating 1 byte")
    assert main.main(["--prompt=a"]) == 2
    assert "lower --batch_size" in capsys.readouterr().err
    engine.load_error = RuntimeError("a fault in the program")
    with pytest.raises(RuntimeError, match="a fault"):
        main.main(["--prompt=a"])


def test_a_prompt_that_cannot_be_encoded_is_named(engine, capsys):
    engine.tokenizer = None
    assert main.main(["--prompt=a"]) == 2
    assert "prompt 'prompt-0': this checkpoint has no tokenizer" in capsys.readouterr().err
