"""Which implementation of an op runs.

An op has several implementations with one signature. What each needs of the machine and of its
arguments is said by the implementation; which one runs is decided here, while tracing.
"""

import dataclasses
import functools
import importlib.util
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax

from pallas_kernels.checks import require, require_choice

KERNELS = ("auto", "cudnn", "mosaic_gpu", "triton", "xla", "interpret", "reference")
PREFERRED = ("cudnn", "mosaic_gpu", "triton", "xla")  # what "auto" tries, in this order

logger = logging.getLogger("pallas_kernels")


def anything(*arguments: Any) -> None:
    """The domain of an implementation that takes all arguments that the op allows."""


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way of computing an op.

    Attributes:
      run: the function, on arguments that the op's public function has checked.
      refuses: given the same arguments, why they are outside the implementation's domain, as a
        sentence that begins with the argument's name; None if it takes them.
    """

    run: Callable[..., Any]
    refuses: Callable[..., str | None] = anything


def choose(
    kernels: str, implementations: Mapping[str, Implementation], *arguments: Any
) -> Callable[..., Any]:
    """Looks up what runs an op.

    Args:
      kernels: the name of an implementation, or "auto" for the first of PREFERRED that this machine
        has and that takes the arguments. Falling back to "xla" on a machine that has another is
        logged, with what each other one refuses.
      implementations: the op's implementations by name.
      arguments: of the op, what `Implementation.run` gets.

    Raises:
      ValueError: there is no implementation of that name, this machine lacks what it needs, or it
        does not take the arguments.
    """
    require_choice("kernels", kernels, ("auto", *implementations))
    if kernels != "auto":
        chosen = implementations[kernels]
        lacking = lacks(kernels)
        require(lacking is None, "kernels", f"is {kernels!r}, which needs {lacking}")
        refusal = chosen.refuses(*arguments)
        if refusal is not None:
            raise ValueError(f"{refusal} with kernels={kernels!r}.")
        return chosen.run
    refusals: list[str] = []
    for name in PREFERRED:
        if name not in implementations or lacks(name) is not None:
            continue
        refusal = implementations[name].refuses(*arguments)
        if refusal is None:
            if name == "xla" and refusals:
                say_once(f"kernels='xla' is used. Passed over: {'; '.join(refusals)}.")
            return implementations[name].run
        refusals.append(f"{name!r}, for {refusal.rstrip(',')}")
    raise AssertionError("every op has an implementation for any machine and any arguments")


def for_other_ops(kernels: str) -> str:
    """What a choice of kernels means for an op, or a size of it, that may have no such kernel."""
    return kernels if kernels in ("xla", "reference") else "auto"


@functools.cache
def say_once(message: str) -> None:
    """Logs a warning the first time that it is given."""
    logger.warning(message)


def lacks(kernels: str) -> str | None:
    """What an implementation needs and this process does not have; None if it can run."""
    if kernels == "cudnn":
        if (compute_capability() or 0.0) < 8.0:
            return f"an NVIDIA GPU of compute capability 8.0 or later, not {device_name()}"
        if not has_cudnn():
            return "cuDNN, which JAX does not find: pip install 'vegas_jax[cuda13]' (or [cuda12])"
    if kernels == "mosaic_gpu":
        if not has_mosaic_gpu():
            return f"jax 0.11 or later, but this is {jax.__version__}"
        if compute_capability() != 9.0:
            return f"an NVIDIA GPU of compute capability 9.0 (H100, H200), not {device_name()}"
    if kernels == "interpret" and not has_mosaic_gpu():
        return f"jax 0.11 or later, but this is {jax.__version__}"
    if kernels == "triton":
        if compute_capability() not in (8.0, 8.6, 8.7, 8.9, 9.0):
            return (
                f"an NVIDIA GPU of compute capability 8.0 to 9.0 (Ampere, Ada, Hopper), "
                f"not {device_name()}"
            )
        if importlib.util.find_spec("jax_triton") is None:
            return "the package jax-triton: pip install 'vegas_jax[triton]'"
    return None


def has_mosaic_gpu() -> bool:
    """Whether this JAX has the Pallas Mosaic GPU interface that the kernels are written for."""
    return jax.version.__version_info__ >= (0, 11, 0)


def has_cudnn() -> bool:
    """Whether JAX's CUDA plugin is there and finds cuDNN."""
    try:
        from jax._src.lib import cuda_versions  # not public, so no reason not to start without it
    except ImportError:
        return False
    try:
        return cuda_versions is not None and cuda_versions.cudnn_get_version() > 0
    except RuntimeError:  # no library of that name
        return False


def compute_capability() -> float | None:
    """Of the default device; None unless it is an NVIDIA GPU."""
    try:
        return float(default_device().compute_capability)
    except (AttributeError, ValueError):  # not a GPU; one of AMD, which names its architecture
        return None


def device_name() -> str:
    """The kind of the default device."""
    return str(default_device().device_kind)


def default_device() -> Any:
    """The device that JAX runs on unless told otherwise."""
    device = jax.config.jax_default_device  # or the name of a platform, or None
    return device if isinstance(device, jax.Device) else jax.devices(device)[0]
