"""Orbax folders: what is written is what is restored, onto any devices, or a sentence says why not.

`test_convert.py` has conversions.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vegas_jax
from vegas_jax.checkpoint import orbax, read_config, read_params, resolve
from vegas_jax.checkpoint.conversion import to_orbax
from vegas_jax.errors import CheckpointError, InputError

ROOT = Path(__file__).parents[3]
GOLDENS = ROOT / "tests" / "goldens"
TIED = GOLDENS / "qwen3-tied"
PACKED = [path.parent for path in GOLDENS.glob("*/config.json") if "mxfp4" in path.read_text()]


def assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """The Orbax folder of a checkpoint that is stored in float32."""
    folder = tmp_path_factory.mktemp("orbax") / "tied"
    to_orbax(TIED, folder)
    return folder


@pytest.fixture
def copy(tied, tmp_path):
    """One that a test may break."""
    for path in tied.rglob("*"):
        target = tmp_path / path.relative_to(tied)
        if path.is_dir():
            target.mkdir(exist_ok=True)
        else:
            target.write_bytes(path.read_bytes())
    return tmp_path


def flat(params):
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {"/".join(key.key for key in path): np.asarray(leaf) for path, leaf in leaves}


def save(folder, params, **config):
    """An Orbax folder of these parameters."""
    leaves = flat(params)
    orbax.save_params(folder, leaves.items(), leaves)
    orbax.Record("float32").write(folder)
    fields = json.loads((TIED / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_load_casts_as_from_safetensors(tied, dtype):
    model, params, tokenizer = vegas_jax.load(tied, dtype)
    expected, wanted, _ = vegas_jax.load(TIED, dtype)
    assert (model, tokenizer) == (expected, None)
    assert_same(params, wanted)


def test_what_is_restored_can_be_used_with_other_arrays(tied):
    params = orbax.restore_params(tied, read_config(tied), "float32")
    assert jnp.zeros(()).sharding == params["embed"].sharding


def test_params_are_an_ordinary_orbax_checkpoint(tied):
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(
            tied.resolve() / "params", orbax.abstract_params(read_config(tied), jnp.float32)
        )
    assert_same(restored, read_params(TIED, read_config(TIED), "float32"))


@pytest.mark.parametrize("folder", PACKED, ids=lambda folder: folder.name)
def test_packed_experts_can_be_dequantised(folder, tmp_path):
    to_orbax(folder, tmp_path / "out")
    model, params, _ = vegas_jax.load(tmp_path / "out", "bfloat16", dequantize=True)
    expected, wanted, _ = vegas_jax.load(folder, "bfloat16", dequantize=True)
    assert model == expected
    assert_same(params, wanted)
    with pytest.raises(InputError, match="convert the checkpoint with --dequantize"):
        orbax.restore_params(tmp_path / "out", model.config, "bfloat16", shardings=params)


SHARDED = """
import sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from vegas_jax.checkpoint import orbax, read_config, read_params
from pathlib import Path

source, folder = map(Path, sys.argv[1:])
config = read_config(source)
mesh = jax.make_mesh((8,), ("x",))
assert mesh.size == 8

def sharding(leaf):
    axes = [axis for axis, size in enumerate(leaf.shape) if size % 8 == 0]
    return NamedSharding(mesh, P(*(["x" if a == axes[-1] else None for a in range(leaf.ndim)]
                                   if axes else [])))

shardings = jax.tree.map(sharding, orbax.abstract_params(config, "bfloat16"))
params = orbax.restore_params(folder, config, "bfloat16", shardings)
whole = read_params(source, config, "bfloat16")
assert jax.tree.map(lambda leaf: leaf.sharding, params) == shardings
for got, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(whole), strict=True):
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(got, wanted)
gate_up = params["layers_0"]["mlp"]["gate_up"]
parts = {(str(s.index), s.data.shape) for s in gate_up.addressable_shards}
assert len(parts) == 8 and {p[1][1] for p in parts} == {gate_up.shape[1] // 8}, parts
print("restored")
"""


def test_restores_onto_eight_devices(tied):
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", SHARDED, TIED, tied], env=environment, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("restored\n", "")


def test_shardings_must_fit_the_tree(tied):
    config = read_config(tied)
    with pytest.raises(InputError, match="shardings must be a tree"):
        orbax.restore_params(tied, config, "float32", {"embed": jnp.zeros(()).sharding})


def test_orbax_is_imported_only_when_needed():
    code = "import sys, vegas_jax.cli.converting; print('orbax.checkpoint' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_parameters_that_do_not_fit_are_listed(tmp_path):
    params = jax.tree.map(np.asarray, read_params(TIED, read_config(TIED), "float32"))
    del params["final_norm"]
    params["layers_0"]["attn"]["sinks"] = np.zeros(4, np.float32)
    params["embed"] = params["embed"][:, :7]
    save(tmp_path, params)
    with pytest.raises(CheckpointError) as raised:
        vegas_jax.load(tmp_path)
    assert str(raised.value).partition("parameters ")[2] == (
        "missing: final_norm/scale; unexpected: layers_0/attn/sinks; "
        "of another shape: embed [256, 7] instead of [256, 48]"
    )


@pytest.mark.parametrize("value", [7e4, -np.inf])
def test_float16_overflow_is_named(tmp_path, value):
    params = jax.tree.map(np.array, read_params(TIED, read_config(TIED), "float32"))
    params["layers_1"]["mlp"]["down"][3, 2] = value
    save(tmp_path, params)
    with pytest.raises(CheckpointError, match=r"layers_1/mlp/down.*float16"):
        vegas_jax.load(tmp_path, "float16")
    vegas_jax.load(tmp_path, "bfloat16")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"orbax\.json does not exist"),
        ("{", r"orbax\.json cannot be read"),
        ("[]", r"orbax\.json holds a JSON list"),
        ("{}", r"orbax\.json lacks the key format"),
        ('{"format": 2}', "format is 2"),
        ('{"format": 1}', "dtype is null"),
        ('{"format": 1, "dtype": "int8"}', 'dtype is "int8"'),
        ('{"format": 1, "dtype": "float32", "other_dtypes": {"embed": 3}}', "embed is 3"),
    ],
)
def test_a_malformed_record_is_named(copy, text, message):
    (copy / "orbax.json").unlink()
    if text is not None:
        (copy / "orbax.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        vegas_jax.load(copy)


@pytest.mark.parametrize("pattern", ["_METADATA", "manifest.ocdbt", "d/*", "*"])
@pytest.mark.parametrize("keep", [None, 0, 0.5])
def test_an_incomplete_folder_is_one_sentence(copy, pattern, keep):
    for path in (copy / "params").rglob(pattern):
        if path.is_file():
            data = path.read_bytes()
            path.unlink()
            if keep is not None:
                path.write_bytes(data[: int(keep * len(data))])
    with pytest.raises(CheckpointError, match=r"params cannot be re.*incomplete") as raised:
        vegas_jax.load(copy)
    assert "\n" not in str(raised.value)
    assert "tensorstore_spec" not in str(raised.value)


@pytest.mark.parametrize("text", ["{}", "null"])
def test_metadata_of_no_use_are_one_sentence(copy, text):
    (copy / "params" / "_METADATA").write_text(text)
    with pytest.raises(CheckpointError, match=r"incomplete: its metadata are malformed$"):
        vegas_jax.load(copy)


def test_without_config_or_params_it_is_no_checkpoint(copy):
    (copy / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        resolve(copy)
    empty = copy / "other"
    empty.mkdir()
    (empty / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"has no \*\.safetensors and no params/"):
        resolve(empty)


def test_chunks_are_neither_whole_matrices_nor_rows():
    chunk = orbax._CHUNK_BYTES
    assert orbax._chunk_bytes((48,), 4) == chunk
    assert orbax._chunk_bytes((151936, 4096), 2) == chunk  # Qwen3-8B's vocabulary
    assert orbax._chunk_bytes((32, 5760, 90, 16), 1) == chunk  # gpt-oss-20b's experts
    assert orbax._chunk_bytes((32001, 4096), 2) is None  # 32001 = 3 * 10667
    assert orbax._chunk_bytes((32003, 4096), 2) is None  # a prime


def test_chunks_are_put_together(tmp_path, monkeypatch):
    monkeypatch.setattr(orbax, "_CHUNK_BYTES", 1000)
    params = read_params(TIED, read_config(TIED), "float32")
    save(tmp_path, params)
    assert_same(orbax.restore_params(tmp_path, read_config(tmp_path), "float32"), params)
