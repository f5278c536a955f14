"""On a mesh of devices: the same tokens, no large transfers, and clear refusals."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import vegas_jax
from vegas_jax.errors import InputError
from vegas_jax.sharding import parse_mesh

ROOT = Path(__file__).parents[2]
MAX_SECONDS = 300  # of a program; it takes 10 to 40 on one core


def start(*arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    try:
        out, err = process.communicate(timeout=MAX_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out, err


def token_ids(path):
    return [json.loads(line)["token_ids"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("mesh", ["data:1,model:1", "model:2", "data:4", "data:2,model:2"])
def test_a_mesh_changes_no_token(mesh):
    finish(start("tests.vegas_jax.sharded_decoding", mesh))


@pytest.mark.parametrize(
    "text",
    ["", "data", "data:0", "data:-1", "data:1,data:1", "rows:1", "data:1;model:1", "data:1,"],
)
def test_text_that_is_no_mesh_is_refused(text):
    with pytest.raises(InputError, match="such as data:2,model:4"):
        parse_mesh(text)


def test_a_mesh_has_both_axes_and_no_more_devices_than_there_are():
    assert dict(parse_mesh("model:1").shape) == {"data": 1, "model": 1}
    number = len(jax.devices())
    for text in (f"data:{number},model:2", f"model:{10**20}"):
        with pytest.raises(InputError, match=f"of at most the {number} devices"):
            parse_mesh(text)


def test_text_is_no_mesh_in_python():
    with pytest.raises(InputError, match=r"mesh is 'data:2', but must be .*parse_mesh"):
        vegas_jax.load(mesh="data:2")


def test_two_processes_decode_together_and_the_first_alone_writes(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"text": [1, 2, 3]}\n{"text": [4, 5]}\n')
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    flags = [f"--checkpoint={ROOT}/tests/goldens/qwen3-tied", "--sparse_min_tokens=8"]
    flags += [f"--prompt_file={tmp_path}/prompts.jsonl", "--max_new_tokens=8", "--batch_size=2"]

    def run(name, *more, **environment):
        output = f"--output={tmp_path / name}.jsonl"
        return start("vegas_jax.decode", *flags, output, *more, **environment)

    processes = [
        run(
            f"together-{i}",
            "--mesh=model:2",
            "--distributed",
            JAX_COORDINATOR_ADDRESS=address,
            JAX_NUM_PROCESSES="2",
            JAX_PROCESS_ID=str(i),
        )
        for i in range(2)
    ]
    try:
        (_, first), (out, second) = map(finish, processes)
    finally:
        for process in processes:
            process.kill()
    assert "tokens/s" in first
    # What Gloo itself has to say goes past Python.
    assert [line for line in out.splitlines() if not line.startswith("[Gloo]")] == []
    assert second == ""
    finish(run("alone"))
    assert token_ids(tmp_path / "together-0.jsonl") == token_ids(tmp_path / "alone.jsonl")
    assert not (tmp_path / "together-1.jsonl").exists()


def test_distributed_needs_a_mesh_and_a_cluster():
    _, err = start("vegas_jax.decode", "--prompt=x", "--distributed").communicate()
    assert err == "error: --distributed needs --mesh: without one all processes do the same\n"
    flags = ["--prompt=x", "--distributed", "--mesh=model:1"]
    _, err = start("vegas_jax.decode", *flags).communicate()
    assert err.startswith("error: --distributed: ")
    assert "JAX_COORDINATOR_ADDRESS" in err
