"""`--distributed`: one command on several processes, of which the first alone prints and writes."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl.flags import FlagValues
from jax.experimental import multihost_utils

from vegas_jax.errors import InputError

# JAX reads JAX_COORDINATOR_ADDRESS itself, and under Slurm, Open MPI and in clouds finds all three.
_VARIABLES = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}


def join(values: FlagValues) -> None:
    """Makes this process one of the cluster's; to be called before anything else touches JAX.

    Raises:
      InputError: there is no cluster to be found, or no mesh to share.
    """
    if not values.distributed:
        return
    if not values.mesh:
        raise InputError("--distributed needs --mesh: without one all processes do the same")
    try:
        given: Any = {k: int(os.environ[v]) for k, v in _VARIABLES.items() if v in os.environ}
        jax.distributed.initialize(**given)
    except (ValueError, RuntimeError) as error:
        reason = str(error).split("\n")[0].rstrip(".")
        raise InputError(
            f"--distributed: {reason}; where JAX does not know the cluster,"
            " JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID must be set"
        ) from None


def leads(values: FlagValues) -> bool:
    """Whether this process prints and writes files."""
    return not values.distributed or jax.process_index() == 0


def agree(
    values: FlagValues, names: Sequence[str], find: Callable[[], frozenset[str]]
) -> frozenset[str]:
    """Some of the names: those that the first process finds, in every process alike.

    Raises:
      InputError: what `find` raises there; elsewhere, that it did.
    """
    if not values.distributed:
        return find()
    found: frozenset[str] = frozenset()
    problem = None
    if leads(values):
        try:
            found = find()
        except InputError as error:
            problem = error
    chosen = [int(problem is not None), *(int(name in found) for name in names)]
    failed, *chosen = multihost_utils.broadcast_one_to_all(np.array(chosen, np.int32)).tolist()
    if failed:
        raise problem or InputError("the first process cannot use --output")
    return frozenset(name for name, taken in zip(names, chosen, strict=True) if taken)
