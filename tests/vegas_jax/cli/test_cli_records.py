import json

import pytest

from vegas_jax.cli import records
from vegas_jax.errors import InputError

SETTINGS = {"temperature": 0.8, "score_pool": (0, 7)}


def wanted(*names):
    return {n: SETTINGS | {"seed": 0, "prompt_sha256": "d-" + n} for n in names}


def line(name, **changes):
    settings = json.loads(json.dumps(wanted(name)[name])) | changes
    return json.dumps({"id": name, "text": "é", "settings": settings}) + "\n"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.jsonl"


def test_a_new_file_has_nothing(path):
    assert records.resume(path, wanted("a")) == frozenset()
    records.prepare(path)
    assert records.resume(path, wanted("a")) == frozenset()
    assert path.read_bytes() == b""


def test_appending_and_resuming(path):
    for name in ("a", "other"):
        records.append(path, {"id": name, "text": "é", "settings": wanted(name)[name]})
    before = path.read_bytes()
    assert "é".encode() in before
    assert records.resume(path, wanted("a", "b")) == {"a"}
    assert path.read_bytes() == before


@pytest.mark.parametrize("cut", [1, 5, 9, 10, 20, 60])
def test_a_cut_last_line_is_dropped(path, cut):
    path.write_text(line("a") + line("b")[:cut])
    assert records.resume(path, wanted("a", "b")) == {"a"}
    assert path.read_text() == line("a")


def test_zeros_where_the_last_line_was_to_be_are_dropped(path):
    path.write_bytes(line("a").encode() + line("b")[:12].encode() + b"\0" * 50)
    assert records.resume(path, wanted("a", "b")) == {"a"}
    assert path.read_text() == line("a")


def test_a_last_record_that_lacks_only_its_line_end_is_kept(path):
    path.write_text(line("a") + line("b")[:-1])
    assert records.resume(path, wanted("a", "b", "c")) == {"a", "b"}
    assert path.read_text() == line("a") + line("b")


def test_a_cut_in_the_middle_of_a_character(path):
    whole = json.dumps({"id": "b", "text": "é"}, ensure_ascii=False).encode()
    path.write_bytes(line("a").encode() + whole[: whole.index(b"\xa9")])
    assert records.resume(path, wanted("a")) == {"a"}
    assert path.read_text() == line("a")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (line("a") + '{"id": "b", "te\n' + line("c"), 2),
        ("my notes", 1),  # a file that is not ours is never truncated
        ("my notes\n", 1),
        ('{"id": "a", "text": "a prompt"}\n', 1),
        (line("a") + '["x"]\n', 2),
        (line("a") + "\n" + line("c"), 2),
    ],
)
def test_other_lines_are_refused_and_nothing_is_changed(path, text, number):
    path.write_text(text)
    with pytest.raises(InputError, match=f"line {number} of .*out.jsonl.* is not a record"):
        records.resume(path, wanted("a", "b"))
    assert path.read_text() == text


def test_other_settings_are_refused_by_name(path):
    path.write_text(line("a") + line("b", temperature=0.5))
    with pytest.raises(InputError, match=r"line 2 .* temperature=0.5, but this run has 0.8"):
        records.resume(path, wanted("a", "b"))
    # ... also for prompts that this run does not have.
    with pytest.raises(InputError, match="temperature"):
        records.resume(path, wanted("a"))


def test_another_prompt_or_seed_under_a_known_id_is_refused(path):
    path.write_text(line("a", prompt_sha256="x"))
    with pytest.raises(InputError, match="id 'a', but was made from another prompt"):
        records.resume(path, wanted("a"))
    path.write_text(line("a", seed=3))
    with pytest.raises(InputError, match="seed=3"):
        records.resume(path, wanted("a"))
    assert records.resume(path, wanted("b")) == frozenset()


def test_prepare_makes_folders(tmp_path):
    records.prepare(tmp_path / "x" / "y" / "out.jsonl")
    assert (tmp_path / "x" / "y" / "out.jsonl").read_bytes() == b""


def test_prepare_refuses_what_it_cannot_write(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        records.prepare(tmp_path / "file" / "out.jsonl")
    with pytest.raises(InputError, match="not a regular file"):
        records.prepare(tmp_path)


def test_a_full_disk_is_one_sentence(monkeypatch, path):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records.os, "fsync", full)
    with pytest.raises(InputError, match=r"cannot write to .*: No space left"):
        records.append(path, {"id": "a"})
