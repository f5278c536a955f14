"""The command line with a template and a real model: no fakes."""

import json

from tests.vegas_jax.text.chat_templates import QWEN3
from vegas_jax import ChatTemplate, Generator, SamplingParams, SpecConfig, load
from vegas_jax.checkpoint import resolve
from vegas_jax.cli import main


def test_the_command_line_gives_what_the_library_gives(tmp_path):
    folder = tmp_path / "chat-model"
    folder.mkdir()
    for file in resolve("codelm-16m").resolve().iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(QWEN3)
    output = tmp_path / "out.jsonl"
    arguments = [f"--checkpoint={folder}", f"--output={output}", "--max_new_tokens=6"]
    arguments += [
        "--chat",
        "--prompt=import os",
        "--system=Write Python.",
        "--temperature=0",
        "--method=plain",
    ]
    assert main.main(arguments) == 0
    (record,) = [json.loads(line) for line in output.read_text().splitlines()]

    model, params, tokenizer = load(folder)
    messages = [
        {"role": "system", "content": "Write Python."},
        {"role": "user", "content": "import os"},
    ]
    ids = ChatTemplate.load(folder).encode(tokenizer, messages)
    generator = Generator(
        model,
        params,
        tokenizer,
        spec=SpecConfig(method="plain"),
        max_len=len(ids) + 6,
        batch_size=1,
    )
    sampling = SamplingParams(max_new_tokens=6, temperature=0.0)
    (completion,) = generator.generate([ids], sampling)
    assert record["prompt_tokens"] == len(ids)
    assert record["token_ids"] == list(completion.token_ids)
    assert record["text"] == completion.text
