import json
import shutil
from pathlib import Path

import pytest

from tests.vegas_jax.text.chat_templates import GPT_OSS, MISTRAL, QWEN3
from vegas_jax.checkpoint import resolve
from vegas_jax.cli import main
from vegas_jax.text import load

FOLDER = resolve("codelm-16m").resolve()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working folder, with templates, and a copy of the shipped checkpoint that has one."""
    monkeypatch.chdir(tmp_path)
    for name, text in [("qwen3", QWEN3), ("gpt_oss", GPT_OSS), ("mistral", MISTRAL)]:
        (tmp_path / f"{name}.jinja").write_text(text)
    copy = tmp_path / "chat-model"
    copy.mkdir()
    for file in FOLDER.iterdir():
        (copy / file.name).symlink_to(file)
    shutil.copy(tmp_path / "qwen3.jinja", copy / "chat_template.jinja")
    return tmp_path


@pytest.fixture(autouse=True)
def tokenizer(engine):
    engine.tokenizer = load(FOLDER)
    return engine.tokenizer


def write_lines(*records):
    Path("p.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return "--prompt_file=p.jsonl"


def run(engine, *arguments):
    """The texts of the prompts that reach the generator."""
    assert main.main(["--chat", *arguments]) == 0
    decode = engine.tokenizer._tokenizer.decode
    return [decode(ids, skip_special_tokens=False) for ids in engine.runs[-1][1]]


def user(content):
    return f"<|im_start|>user\n{content}<|im_end|>\n"


END = "<|im_start|>assistant\n"
SYSTEM = "<|im_start|>system\nBe brief.<|im_end|>\n"


def test_prompts_are_what_a_user_says(engine):
    Path("a.txt").write_text("from a file\n")
    texts = run(engine, "--checkpoint=chat-model", "--prompt=Hi", "--prompt_file=a.txt")
    assert texts == [user("Hi") + END, user("from a file\n") + END]
    assert engine.channels == "final"


def test_a_system_message_and_arguments_for_the_template(engine):
    arguments = ["--checkpoint=chat-model", "--prompt=Hi", "--system=Be brief."]
    arguments += ['--chat_template_kwargs={"enable_thinking": false}', "--channels=all"]
    assert run(engine, *arguments) == [SYSTEM + user("Hi") + END + "<think>\n\n</think>\n\n"]
    assert engine.channels == "all"


def test_tools_and_an_open_end_are_arguments_too(engine):
    arguments = {"tools": [{"name": "f"}], "add_generation_prompt": False}
    given = f"--chat_template_kwargs={json.dumps(arguments)}"
    (text,) = run(engine, "--checkpoint=chat-model", "--prompt=Hi", given)
    assert '<tools>\n{"name": "f"}\n</tools>' in text
    assert text.endswith(user("Hi"))


def test_a_template_from_a_file(engine):
    given = ["--chat_template=mistral.jinja", "--prompt=Hi"]
    assert run(engine, *given) == ["<|endoftext|>[INST] Hi [/INST]"]
    # ... also where the checkpoint has one.
    assert run(engine, "--checkpoint=chat-model", *given) == ["<|endoftext|>[INST] Hi [/INST]"]


def test_messages_in_jsonl(engine):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = write_lines({"messages": [*talk, *talk[:1]]}, {"text": "c"}, {"id": 7, "messages": talk})
    texts = run(engine, "--checkpoint=chat-model", file, "--system=Be brief.", "--batch_size=4")
    middle = user("a") + "<|im_start|>assistant\nb<|im_end|>\n"
    assert texts == [
        SYSTEM + middle + user("a") + END,
        SYSTEM + user("c") + END,
        SYSTEM + middle + END,
    ]
    file = write_lines({"messages": talk, "text": "other"})
    assert run(engine, "--checkpoint=chat-model", file, "--prompt_field=messages") == [middle + END]


def test_joined_files_are_one_message(engine):
    Path("a.py").write_text("a = 1\n")
    given = ["--prompt_file=a.py", "--join_files", "--checkpoint=chat-model"]
    assert run(engine, *given) == [user("# file: a.py\na = 1\n") + END]


def test_without_chat_everything_is_as_before(engine):
    assert main.main(["--checkpoint=chat-model", "--prompt=Hi", "--output=out.jsonl"]) == 0
    assert engine.runs[-1][1] == [[ord("H"), ord("i")]]
    assert engine.channels is None
    settings = json.loads(Path("out.jsonl").read_text())["settings"]
    assert not any("chat" in name for name in settings)


def test_an_empty_final_channel_is_said(engine, capsys):
    engine.tokenizer._tokenizer.add_special_tokens(["<|channel|>", "<|message|>"])
    engine.tokenizer = type(engine.tokenizer)(engine.tokenizer._tokenizer)
    complete = engine.complete

    def nothing_shown(*arguments):
        completion = complete(*arguments)
        object.__setattr__(completion, "text", "")
        return completion

    engine.complete = nothing_shown
    arguments = ["--chat", "--chat_template=gpt_oss.jinja", "--prompt=Hi", "--max_new_tokens=4"]
    assert main.main(arguments) == 0
    assert "prompt-0: the reply has nothing in its final channel" in capsys.readouterr().err
    assert main.main([*arguments, "--channels=all"]) == 0
    assert "final channel" not in capsys.readouterr().err


def test_records_are_resumed_with_the_same_chat_only(engine, capsys):
    arguments = ["--chat", "--checkpoint=chat-model", "--prompt=Hi", "--output=out.jsonl"]
    assert main.main(arguments) == 0
    runs = len(engine.runs)
    assert main.main(arguments) == 0
    assert len(engine.runs) == runs
    for change, message in [
        ("--system=x", "made from another prompt"),
        ("--channels=all", "channels"),
        ('--chat_template_kwargs={"a": 1}', "chat_template_kwargs"),
        ("--chat_template=gpt_oss.jinja", "chat_template_sha256"),
        ("--nochat", "ch"),
    ]:
        assert main.main([*arguments, change]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--system=x"], "--system needs --chat"),
        (["--chat_template=x"], "--chat_template needs --chat"),
        (["--chat_template_kwargs={}"], "--chat_template_kwargs needs --chat"),
        (["--channels=final"], "--channels needs --chat"),
        (["--chat"], "checkpoint 'codelm-16m' has no chat template: give one with --chat_template"),
        (["--chat", "--checkpoint=none"], "checkpoint 'none' does not exist"),
        (["--chat", "--system="], "--system is empty"),
        (["--chat", "--chat_template="], "--chat_template is empty"),
        (["--chat", "--chat_template=none"], "cannot read the chat template 'none'"),
        (["--chat", "--channels=some"], "flag --channels=some"),
        (["--chat", "--chat_template_kwargs=x"], "must be a JSON object such as"),
        (["--chat", "--chat_template_kwargs=[1]"], "must be a JSON object such as"),
        (["--chat", "--chat_template_kwargs="], "must be a JSON object such as"),
        (["--chat", "--system=\udcff", "--chat_template=qwen3.jinja"], "--system is not valid"),
        (["--chat", "--max_prompt_tokens=9"], "--max_prompt_tokens would cut off"),
        (
            ["--chat", "--chat_template=mistral.jinja", "--system=x"],
            "prompt 'prompt-0': the chat template refuses the messages: system role not supported",
        ),
        (
            ["--chat", "--chat_template=qwen3.jinja", '--chat_template_kwargs={"messages": 1}'],
            "'messages' is no argument for the template",
        ),
    ],
)
def test_bad_input(engine, capsys, arguments, message):
    assert main.main(["--prompt=Hi", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert not engine.loads


SYSTEM_MESSAGE = {"role": "system", "content": "x"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": [1, 2]}, "prompt 'p.jsonl:1' is token ids, but --chat needs text or messages"),
        ({"messages": []}, "p.jsonl:1: messages must be a non-empty list"),
        ({"messages": [{}]}, "p.jsonl:1: messages[0] has the role None"),
        ({"messages": [SYSTEM_MESSAGE], "text": "a"}, "both 'messages' and 'text': leave one out"),
        ({"messages": [SYSTEM_MESSAGE]}, "has a system message already: omit --system"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "half a surrogate pair"),
        ({"prompt": "a"}, "has no field 'text' (--prompt_field names the field to use)"),
        ({"text": ""}, "prompt 'p.jsonl:1' is empty"),
    ],
)
def test_bad_jsonl(engine, capsys, record, message):
    arguments = ["--chat", "--checkpoint=chat-model", "--system=y", write_lines(record)]
    assert main.main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not engine.loads


def test_messages_need_chat(engine, capsys):
    assert main.main([write_lines({"messages": [SYSTEM_MESSAGE]})]) == 2
    assert "has no field 'text' (--chat reads its messages)" in capsys.readouterr().err


def test_a_chat_needs_a_tokenizer(engine, capsys):
    engine.tokenizer = None
    assert main.main(["--chat", "--checkpoint=chat-model", "--prompt=Hi"]) == 2
    assert "--chat needs a tokenizer" in capsys.readouterr().err
