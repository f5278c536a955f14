"""Conversions between Hugging Face and Orbax folders: exact, whole or not at all."""

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

import vegas_jax
from vegas_jax.checkpoint import conversion, orbax, read_config
from vegas_jax.checkpoint.conversion import to_huggingface, to_orbax
from vegas_jax.checkpoint.export import hub_plan
from vegas_jax.checkpoint.hf_config import read_fp8_block
from vegas_jax.checkpoint.tensors import StoredTensor, open_tensors
from vegas_jax.cli.converting import main
from vegas_jax.errors import CheckpointError, InputError

ROOT = Path(__file__).parents[3]
GOLDENS = ROOT / "tests" / "goldens"
FOLDERS = sorted(path.parent for path in GOLDENS.glob("*/config.json"))
PACKED = [path for path in FOLDERS if "mxfp4" in (path / "config.json").read_text()]
TIED, UNTIED = GOLDENS / "qwen3-tied", GOLDENS / "qwen3-untied"
NAME = {"ids": lambda folder: folder.name}


def stored(folder):
    """All tensors as they are stored, by their names without prefix."""
    with contextlib.ExitStack() as files:
        tensors = open_tensors(folder, files, read_fp8_block(folder))
        return {name: (tensor.dtype, tensor.read()) for name, tensor in tensors.items()}


def on_the_hub(folder):
    """What `stored` gives of the checkpoint if it is laid out and named as on the hub."""
    tensors = {}
    for name, (dtype, array) in stored(folder).items():
        if name.endswith("mlp.experts.gate_up_proj") and "Qwen3Moe" in config_text(folder):
            start = name.removesuffix("gate_up_proj")
            for i, pair in enumerate(array):
                for half, matrix in zip(("gate", "up"), np.split(pair, 2), strict=True):
                    tensors[f"{start}{i}.{half}_proj.weight"] = dtype, matrix
        elif name.endswith("mlp.experts.down_proj") and "Qwen3Moe" in config_text(folder):
            for i, matrix in enumerate(array):
                tensors[f"{name.removesuffix('down_proj')}{i}.down_proj.weight"] = dtype, matrix
        elif dtype == "F8_E4M3":
            tensors[name] = "BF16", array.astype(jnp.bfloat16)
        else:
            tensors[name] = dtype, array
    return tensors


def config_text(folder):
    return (folder / "config.json").read_text()


def is_fp8(folder):
    return read_fp8_block(folder) is not None


def assert_equal_tensors(got, wanted):
    assert got.keys() == wanted.keys()
    for name, (dtype, array) in wanted.items():
        assert got[name][0] == dtype, name
        np.testing.assert_array_equal(got[name][1], array, err_msg=name)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def assert_same_logits(folders, dtype):
    model, _, _ = vegas_jax.load(folders[0], dtype)
    tokens = jnp.arange(12, dtype=jnp.int32).reshape(2, 6)
    lengths = jnp.array([6, 4], jnp.int32)
    logits = jax.jit(lambda params: vegas_jax.logits(model, params, tokens, lengths))
    first, *others = (logits(vegas_jax.load(folder, dtype)[1]) for folder in folders)
    for other in others:
        np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("folder", FOLDERS, **NAME)
def test_there_and_back(folder, tmp_path):
    there, back = tmp_path / "there", tmp_path / "back"
    shares = []
    to_orbax(folder, there, progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1
    to_huggingface(there, back, progress=shares.append)
    assert names_in(tmp_path) == ["back", "there"]

    assert_equal_tensors(stored(back), on_the_hub(folder))
    if not is_fp8(folder):
        for copy in (there, back):
            assert (copy / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    with safe_open(back / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == {
            name for leaf in hub_plan(read_config(back)).values() for name in leaf.sources
        }
    dtype = "bfloat16" if is_fp8(folder) else "float32"
    assert_same_logits([folder, there, back], dtype)


@pytest.mark.parametrize("folder", PACKED, **NAME)
def test_dequantised_there_and_back(folder, tmp_path):
    there, back = tmp_path / "there", tmp_path / "back"
    to_orbax(folder, there, dequantize=True)
    to_huggingface(there, back)
    for copy in (there, back):
        assert "quantization_config" not in config_text(copy)
        model, params, _ = vegas_jax.load(copy, "float32")
        assert not model.config.moe.packed
        wanted = vegas_jax.load(folder, "float32", dequantize=True)[1]
        jax.tree.map(np.testing.assert_array_equal, params, wanted)


def test_dtype_is_that_of_matrices(tmp_path):
    there, back = tmp_path / "there", tmp_path / "back"
    to_orbax(TIED, there, "bfloat16")
    assert json.loads(config_text(there))["dtype"] == "bfloat16"
    to_huggingface(there, back)
    for name, (_, array) in stored(TIED).items():
        got, values = stored(back)[name]
        assert got == ("F32" if "norm" in name else "BF16")
        np.testing.assert_array_equal(
            values, array if "norm" in name else array.astype(jnp.bfloat16)
        )


def test_shards(tmp_path):
    to_orbax(UNTIED, tmp_path / "there")
    to_huggingface(tmp_path / "there", tmp_path / "back", shard_bytes=40_000)
    shards = sorted((tmp_path / "back").glob("*.safetensors"))
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    assert [path.name for path in shards] == names
    assert len(shards) > 2
    tensors = {}
    for path in shards:
        with safe_open(path, framework="numpy") as file:
            shard = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert sum(array.nbytes for array in shard.values()) <= 40_000
        tensors |= dict.fromkeys(shard, path.name)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == tensors
    assert_equal_tensors(stored(tmp_path / "back"), stored(UNTIED))


def test_text_files_are_copied(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(TIED, source)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (source / name).write_text(name)
    to_orbax(source, tmp_path / "there")
    to_huggingface(tmp_path / "there", tmp_path / "back")
    for copy in ("there", "back"):
        for name in conversion.COPIED:
            assert (tmp_path / copy / name).read_bytes() == (source / name).read_bytes()


@pytest.fixture
def failing(monkeypatch):
    """Makes the seventh tensor that is read raise."""
    read, count = StoredTensor.read, iter(range(1000))

    def failing_with(action):
        def read_or_fail(tensor):
            if next(count) == 7:
                action()
            return read(tensor)

        monkeypatch.setattr(StoredTensor, "read", read_or_fail)

    return failing_with


def fail():
    raise CheckpointError("shard 2 cannot be read")


def test_a_failing_read_leaves_nothing(tmp_path, failing):
    failing(fail)
    with pytest.raises(CheckpointError, match=r"^shard 2 cannot be read$"):
        to_orbax(TIED, tmp_path / "out")
    assert names_in(tmp_path) == []


def test_ctrl_c_leaves_nothing(tmp_path, failing, capsys):
    failing(lambda: signal.raise_signal(signal.SIGINT))
    assert main([f"--hf={TIED}", f"--out={tmp_path / 'out'}"]) == 130
    assert capsys.readouterr().err == "error: interrupted: nothing was written\n"
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("way", ["hf", "orbax"])
def test_a_full_disk_leaves_nothing(tmp_path, capsys, way):
    source, out = TIED, tmp_path / "out"
    if way == "orbax":
        source = tmp_path / "source"
        to_orbax(TIED, source)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        assert main([f"--{way}={source}", f"--out={out}"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().err.count("\n") == 1
    assert names_in(tmp_path) == (["source"] if way == "orbax" else [])


KILLED = """
import os, signal, sys
from vegas_jax.checkpoint import conversion
from vegas_jax.checkpoint.conversion import to_huggingface, to_orbax

where, way, source, out = sys.argv[1:]

def kill(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

def kill_half_way(share):
    if share > 0.5:
        kill()

if where == "copy":
    conversion._copy = kill
convert = to_orbax if way == "hf" else to_huggingface
convert(source, out, progress=kill_half_way if where == "progress" else lambda share: None)
"""


@pytest.mark.parametrize(("where", "way"), [("progress", "hf"), ("copy", "hf"), ("copy", "orbax")])
def test_a_killed_conversion_leaves_nothing_that_loads(tmp_path, where, way):
    source = TIED
    if way == "orbax":
        source = tmp_path / "source"
        to_orbax(TIED, source)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, where, way, source, tmp_path / "out"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "out").exists()
    left = [path for path in tmp_path.iterdir() if path.name.startswith(".out.new-")]
    assert len(left) == 1
    assert any(left[0].iterdir())
    with pytest.raises(CheckpointError):
        vegas_jax.load(left[0])
    convert = to_orbax if way == "hf" else to_huggingface
    convert(source, tmp_path / "out")  # what is left is not in the way
    vegas_jax.load(tmp_path / "out")


def test_an_existing_checkpoint_is_replaced_only_on_demand_and_at_the_end(tmp_path, failing):
    out = tmp_path / "out"
    to_orbax(UNTIED, out)
    before = config_text(out)
    with pytest.raises(InputError, match="exists already"):
        to_orbax(TIED, out)

    failing(fail)
    with pytest.raises(CheckpointError, match="shard 2"):
        to_orbax(TIED, out, overwrite=True)
    assert config_text(out) == before
    vegas_jax.load(out)

    to_orbax(TIED, out, overwrite=True)
    assert config_text(out) == config_text(TIED)
    vegas_jax.load(out)
    assert names_in(tmp_path) == ["out"]


def test_only_checkpoints_are_overwritten_and_never_the_source(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "letter.txt").write_text("")
    with pytest.raises(InputError, match="it is no checkpoint"):
        to_orbax(TIED, precious, overwrite=True)
    with pytest.raises(InputError, match="it is no checkpoint"):
        to_orbax(TIED, precious / "letter.txt", overwrite=True)
    source = precious / "source"
    shutil.copytree(TIED, source)
    for out in (source, precious):
        with pytest.raises(InputError, match="holds what is to be converted"):
            to_orbax(source, out, overwrite=True)
    with pytest.raises(InputError, match="there is no folder"):
        to_orbax(source, tmp_path / "no" / "out")
    assert names_in(precious) == ["letter.txt", "source"]


def test_the_command_line(tmp_path, capsys):
    there, back = tmp_path / "there", tmp_path / "back"
    assert main([f"--hf={UNTIED}", f"--out={there}", "--dtype=float32"]) == 0
    assert main([f"--orbax={there}", f"--out={back}"]) == 0
    output = capsys.readouterr()
    assert output.out == ""
    assert [line[:5] for line in output.err.splitlines()] == ["wrote", "wrote"]
    assert stored(back)["embed_tokens.weight"][0] == "F32"
    assert main(["--help"]) == 0
    assert "--[no]overwrite" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of --hf and --orbax"),
        (["--hf=a", "--orbax=b", "--out=c"], "give one of --hf and --orbax"),
        ([f"--hf={TIED}"], "--out is missing"),
        (["--hf=", "--out=c"], "--hf is empty"),
        ([f"--hf={TIED}", "--out="], "--out is empty"),
        (["--orbax=b", "--out=c", "--dtype=float32"], "--dtype needs --hf"),
        (["--orbax=b", "--out=c", "--dequantize"], "--dequantize needs --hf"),
        ([f"--hf={TIED}", "--out=c", "--dtype=int8"], "dtype"),
        (["--hf=nowhere", "--out=c"], "'nowhere' does not exist"),
        (["--orbax=nowhere", "--out=c"], "'nowhere' does not exist"),
        ([f"--orbax={TIED}", "--out=c"], "is no Orbax folder"),
        ([f"--hf={TIED}", "--out=c", "more"], "unexpected argument 'more'"),
        ([f"--hf={TIED}", "--out=c", "--outt=d"], "outt"),
        ([f"--hf={TIED}", f"--out={TIED}"], "exists already"),
    ],
)
def test_wrong_flags_are_one_sentence(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    ("asked", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_asked_to_stop_it_leaves_nothing(tmp_path, monkeypatch, capsys, asked, code):
    """Also where the exception arrives in a callback, which drops it."""
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    def drops(values, config, dtype, source):
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), asked)
        return read_leaves(values, config, dtype, source)

    read_leaves = conversion.read_leaves
    monkeypatch.setattr(conversion, "read_leaves", drops)
    assert main([f"--hf={TIED}", f"--out={tmp_path / 'out'}"]) == code
    assert capsys.readouterr().err == "error: interrupted: nothing was written\n"
    assert names_in(tmp_path) == []
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_what_is_still_being_written_is_removed_too(tmp_path):
    writers = []

    def write(folder):
        for i in range(8):
            with contextlib.suppress(FileNotFoundError):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / str(i)).touch()
            time.sleep(0.02)

    def interrupted():
        with conversion.replacing(tmp_path / "out", TIED, False) as new:
            writers.append(threading.Thread(target=write, args=[new / "d"]))
            writers[0].start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    writers[0].join()
    assert names_in(tmp_path) == []


def test_a_gguf_file_is_not_converted(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="but a GGUF file"):
        to_orbax(tmp_path / "model.gguf", tmp_path / "out")


def test_an_orbax_folder_is_not_converted_again(tmp_path):
    to_orbax(TIED, tmp_path / "there")
    with pytest.raises(CheckpointError, match="is an Orbax folder already"):
        to_orbax(tmp_path / "there", tmp_path / "out")


def test_a_broken_orbax_folder_is_not_converted_back(tmp_path):
    there = tmp_path / "there"
    to_orbax(TIED, there)
    for path in there.rglob("d/*"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"cannot be re.*incomplete"):
        to_huggingface(there, tmp_path / "back")
    assert names_in(tmp_path) == ["there"]
    orbax.Record.read(there)
