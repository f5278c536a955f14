import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import shapes
from pallas_kernels.bench import __main__ as command
from pallas_kernels.bench import cases, select, timing
from pallas_kernels.dispatch import Implementation


@pytest.fixture
def tiny(monkeypatch):
    """A machine without a GPU, and shapes that take it no time."""
    heads = shapes.Heads("tiny", query=4, kv=2, dim=16)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(shapes, "SMALL_CACHE", shapes.CacheShape(heads, 3, 384))
    monkeypatch.setattr(shapes, "SMALL_KEYS", 128)
    monkeypatch.setattr(shapes, "SMALL_SELECTION", shapes.SelectShape(1, 2, 64, 9))
    monkeypatch.setattr(shapes, "SPARSE_BLOCKS", (16, 1))
    monkeypatch.setattr(timing, "copy_bandwidth", lambda size: {"guessed": 1e10})


def rows(text, column):
    """A column of all tables, without their heads."""
    head, *lines = [line for line in text.splitlines() if line.startswith("|")]
    place = [cell.strip() for cell in head.split("|")].index(column)
    return [line.split("|")[place].strip() for line in lines[1:]]


def test_checks_and_times_every_op(tiny, capsys):
    assert command.main([]) == 0
    text = capsys.readouterr().out
    assert text.startswith("There is no GPU here")
    assert [line for line in text.splitlines() if line.startswith("### ")] == [
        f"### {command.TITLES[op]}" for op in ("verify", "sparse", "select", "grouped")
    ]
    for table, count in zip(text.split("### ")[1:], (5, 2, 2, 1), strict=True):
        assert len(rows(table, "error")) == count
        assert all(float(error) < 2e-2 for error in rows(table, "error"))
        assert all(float(us) > 0 for us in rows(table, "us"))
        assert len({len(line) for line in table.splitlines() if line.startswith("|")}) == 1


@pytest.mark.parametrize(("result", "said"), [("wrong", "WRONG: "), ("raised", "TypeError: no")])
def test_fails_with_an_op(tiny, monkeypatch, capsys, result, said):
    def broken(scores, k, max_k):
        if result == "raised":
            raise TypeError("no\nsuch op")
        return jnp.zeros((*k.shape, max_k), jnp.int32), k

    monkeypatch.setitem(select.IMPLEMENTATIONS, "xla", Implementation(broken))
    assert command.main(["--op=select"]) == 1
    broken_error, peer_error = rows(capsys.readouterr().out.split("### ")[1], "error")
    assert broken_error.startswith(said)
    assert peer_error == "0"


def test_a_refusal_does_not_fail(tiny, monkeypatch):
    def refuses(*arguments):
        return "`k` must be even, but is not,"

    other = Implementation(lambda *arguments: None, refuses)
    monkeypatch.setitem(select.IMPLEMENTATIONS, "xla", other)
    machine = cases.Machine(1e10, small=True, threads=1)
    group = select.group_of(shapes.SMALL_SELECTION, machine)
    outcome = next(o for _, case, o in cases.measure([group], machine) if case.kernels == "xla")
    assert not outcome.failed
    assert outcome.problem == "`k` must be even, but is not, with kernels='xla'."


@pytest.mark.parametrize("flag", ["--op=verify,prune", "--threads=0", "--shapes=all", "--op"])
def test_a_bad_flag_is_one_sentence(flag, capsys):
    with pytest.raises(SystemExit) as exit_:
        command.main([flag])
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert not out
    assert re.fullmatch(r"[A-Z].*[.]\n", err)


def test_every_call_of_the_loop_depends_on_the_one_before():
    def call(trip, nudge, x):
        return {"first": nudge + x, "trip": trip}

    rotation = [(jnp.float32(1),), (jnp.float32(10),)]
    run = jax.jit(timing.looped(call, trips=3))
    outputs = run(jnp.float32(1), rotation)  # where the benchmark has 0, so that nudges add up
    assert [float(output["first"]) for output in outputs] == [23, 33]
    assert int(outputs[-1]["trip"]) == 2
    outputs = run(jnp.float32(0), rotation)
    assert [float(output["first"]) for output in outputs] == [1, 10]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other backends name sorts otherwise")
def test_no_call_leaves_the_loop():
    def call(trip, nudge, x):
        return {"sorted": jnp.sort(x + nudge)}

    run = jax.jit(timing.looped(call, trips=3))
    text = run.lower(jnp.float32(0), [(jnp.zeros(64, jnp.float32),)]).compile().as_text()
    entry = text[text.index("\nENTRY") :]
    assert " sort(" in text
    assert "while" in entry
    assert " sort(" not in entry
