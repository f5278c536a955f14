import json
import os

import pytest

from vegas_jax.cli.prompts import JOINED_ID, read_prompts
from vegas_jax.errors import InputError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(prompts):
    return [(p.id, p.content) for p in prompts]


def test_texts_are_numbered_and_taken_as_they_are():
    assert contents(read_prompts([r"a\n", "b,c"], [])) == [
        ("prompt-0", r"a\n"),
        ("prompt-1", "b,c"),
    ]


def test_text_files_by_comma_list_glob_and_recursive_glob(folder):
    (folder / "sub" / "deep").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/deep/d.txt", "with,comma.md"):
        (folder / name).write_text(name)
    assert [p.id for p in read_prompts([], ["b.txt,a.txt"])] == ["b.txt", "a.txt"]
    assert [p.id for p in read_prompts([], ["with,comma.md"])] == ["with,comma.md"]
    assert [p.id for p in read_prompts([], ["**/*.txt"])] == [
        "a.txt",
        "b.txt",
        "sub/c.txt",
        "sub/deep/d.txt",
    ]
    # Overlapping patterns read a file once.
    assert [p.id for p in read_prompts([], ["b.txt", "*.txt"])] == ["b.txt", "a.txt"]


def test_a_glob_skips_folders_and_a_literal_path_with_brackets_is_a_path(folder):
    (folder / "x.d").mkdir()
    (folder / "y.d").write_text("y")
    (folder / "z[1].txt").write_text("z")
    assert [p.id for p in read_prompts([], ["*.d"])] == ["y.d"]
    assert [p.id for p in read_prompts([], ["z[1].txt"])] == ["z[1].txt"]


def test_line_ends_are_kept_and_the_byte_order_mark_is_not(folder):
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    assert read_prompts([], ["a.txt"])[0].content == "one\r\ntwo\n"


def test_jsonl_ids_ids_made_up_and_token_ids(folder):
    lines = [
        {"id": "x", "text": "one"},
        {"id": 7, "text": "two\u2028still two"},
        {"text": [1, 2, 3]},
    ]
    text = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines[:2])
    (folder / "p.jsonl").write_text(text + "\n\n  \n" + json.dumps(lines[2]), encoding="utf-8")
    assert contents(read_prompts([], ["p.jsonl"])) == [
        ("x", "one"),
        ("7", "two\u2028still two"),
        ("p.jsonl:5", (1, 2, 3)),
    ]


def test_another_field(folder):
    (folder / "p.jsonl").write_text('{"question": "q", "text": 3}\n')
    assert read_prompts([], ["p.jsonl"], field="question")[0].content == "q"


def test_join_files_makes_one_prompt_with_headers(folder):
    (folder / "sub").mkdir()
    (folder / "b.py").write_text("b = 1")
    (folder / "a.py").write_text("a = 1\n")
    (folder / "sub" / "__init__.py").write_text("")
    prompts = read_prompts(["first"], ["**/*.py"], join_files=True)
    assert contents(prompts)[1:] == [
        (JOINED_ID, "# file: a.py\na = 1\n# file: b.py\nb = 1\n"),
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"text": "a"}\n{"text": \n', "p.jsonl:2 is not valid JSON"),
        (b'{"text": "a"}\n\n[1]\n', "p.jsonl:3 is not a JSON object"),
        (b'{"txt": "a"}\n', "p.jsonl:1 has no field 'text'"),
        (b'{"text": null}\n', "field 'text' of p.jsonl:1 must be a string or a list"),
        (b'{"text": [1, true]}\n', "field 'text' of p.jsonl:1"),
        (b'{"text": [1, -1]}\n', "field 'text' of p.jsonl:1"),
        (b'{"id": null, "text": "a"}\n', "p.jsonl:1 has the id None"),
        (b'{"id": true, "text": "a"}\n', "p.jsonl:1 has the id True"),
        (b'{"text": "\\ud800"}\n', "p.jsonl:1 has half a surrogate"),
        (b'{"id": "\\ud800", "text": "a"}\n', "p.jsonl:1 has half a surrogate"),
        (b'{"id": 1, "text": "a"}\n{"id": "1", "text": "b"}\n', "id '1' occurs twice"),
        (b'{"id": "e", "text": ""}\n', "prompt 'e' is empty"),
        (b'{"id": "e", "text": []}\n', "prompt 'e' is empty"),
        (b'{"text": "a\xff"}\n', "'p.jsonl' is not UTF-8: bad byte at offset 11"),
        (b"\xef\xbb\xbfa\xff", "'p.jsonl' is not UTF-8: bad byte at offset 4"),
        (b"\n\n", "no prompt in p.jsonl"),
        (b"[" * 100_000, "p.jsonl:1 is not valid JSON"),
    ],
)
def test_bad_jsonl(folder, data, message):
    (folder / "p.jsonl").write_bytes(data)
    with pytest.raises(InputError) as error:
        read_prompts([], ["p.jsonl"])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_bad_paths(folder):
    (folder / "dir").mkdir()
    (folder / "empty.txt").write_text("")
    (folder / "p.jsonl").write_text('{"text": "a"}\n')
    (folder / "gone").symlink_to("nowhere")
    for patterns, message in [
        (["dir"], "cannot read 'dir': Is a directory"),
        (["gone"], "cannot read 'gone': No such file"),
        (["empty.txt"], "prompt 'empty.txt' is empty"),
        (["no*.txt"], "no file matches 'no*.txt'"),
        (["p.jsonl,none.txt"], "there is no file 'none.txt'"),
    ]:
        with pytest.raises(InputError) as error:
            read_prompts([], patterns)
        assert message in str(error.value)
    with pytest.raises(InputError, match=r"'p\.jsonl' is JSONL"):
        read_prompts([], ["p.jsonl"], join_files=True)
    with pytest.raises(InputError, match="needs --prompt_file"):
        read_prompts(["a"], [], join_files=True)


def test_nothing_given_and_bad_texts():
    with pytest.raises(InputError, match="give --prompt or --prompt_file"):
        read_prompts([], [])
    with pytest.raises(InputError, match="'prompt-1' is empty"):
        read_prompts(["a", ""], [])
    with pytest.raises(InputError, match="'prompt-0' is not valid UTF-8"):
        read_prompts([os.fsdecode(b"\xff")], [])


def test_an_id_like_a_numbered_prompt_is_refused(folder):
    (folder / "p.jsonl").write_text('{"id": "prompt-0", "text": "a"}\n')
    with pytest.raises(InputError, match="'prompt-0' occurs twice"):
        read_prompts(["a"], ["p.jsonl"])


def test_digest_tells_contents_apart():
    one, other = read_prompts(["a", "b"], [])
    assert one.digest != other.digest
    assert len(one.digest) == 16
