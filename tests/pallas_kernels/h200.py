"""Compiling for an H200 on a machine without one.

XLA's CUDA compiler needs a description of the GPU, not the GPU. `pip install --no-deps
jax-cuda13-plugin==0.11.2 jax-cuda13-pjrt==0.11.2 nvidia-cuda-nvcc==13.0.88 nvidia-nvvm`.
"""

import dataclasses
import functools
import importlib.util
import pathlib
import re

import jax
import numpy as np
from jax.experimental import topologies

from pallas_kernels.dispatch import has_mosaic_gpu

TARGET = pathlib.Path(__file__).with_name("h200.txtpb")
SHARED_BYTES = 232_448  # that a block may have


@dataclasses.dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes.

    Attributes:
      registers: of a thread, before warpgroups trade them.
      spilled_bytes: of a thread, stored to memory and loaded back for want of registers.
      shared_bytes: shared memory of a block, without barriers.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int


def lacking():
    """What compiling for an H200 needs and this environment does not have, or None."""
    if not has_mosaic_gpu():
        return "needs JAX 0.11"
    for name in ("jax_plugins.xla_cuda13", "jax_cuda13_plugin", "nvidia.cu13"):
        if not _is_installed(name):
            return f"needs the package {name}, see tests/pallas_kernels/h200.py"
    return None


def compile_kernels(function, shapes, folder, monkeypatch):
    """Compiles a function of arrays of these shapes; returns Resources of each Mosaic kernel.

    Raises whatever the compiler finds wrong, such as more shared memory than there is.
    """
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(folder))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    sharding = jax.sharding.NamedSharding(_h200(), jax.sharding.PartitionSpec())
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in shapes]
    jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).compile()
    return [_resources(report) for report in sorted(folder.glob("*.ptxas"))]


def _resources(report):
    text = report.read_text()
    stores, loads = map(int, re.search(r"(\d+) bytes spill stores, (\d+)", text).groups())
    registers = int(re.search(r"Used (\d+) registers", text).group(1))
    shared = re.search(
        r"smem_scratch_bytes=(\d+)", report.with_suffix(".resources.txt").read_text()
    )
    return Resources(registers, stores + loads, int(shared.group(1)))


@functools.cache
def _h200():
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        topology="1x1x1",
        target_config=TARGET.read_text(),
    )
    return jax.sharding.Mesh(np.array(topology.devices), ("device",))


def _is_installed(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a package that the module would be in
        return False
