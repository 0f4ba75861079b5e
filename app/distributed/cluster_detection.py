"""Cluster detection by JAX's private detection code; no other module depends on it."""

from __future__ import annotations

from jax._src import cloud_tpu_init
from jax._src.clusters import ClusterEnv

from app.distributed.rendezvous_check import ClusterMember
from settings.errors import InputError

MANUAL_SETTINGS_HINT = "set mesh.coordinator_address, mesh.num_processes and mesh.process_id instead"


def is_cloud_tpu_vm() -> bool:
    """Returns whether this machine has TPUs and their library, without accessing a device or the network."""
    return cloud_tpu_init.running_in_cloud_tpu_vm


def detect_cluster(*, timeout_s: int, required: bool = False) -> ClusterMember | None:
    """Returns this process's place in its Cloud TPU, Slurm, Open MPI or Kubernetes cluster; None for a single host.

    Args:
        required: whether to raise, instead of returning None, if the platform does not answer.

    Raises:
        InputError: the platform's description of its hosts cannot be read, or a required platform does not answer.
    """
    try:
        address, num_processes, process_id, _ = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, timeout_s
        )
    except OSError as error:
        if required:
            raise InputError(
                "mesh.coordinator_address: the value is auto, but the platform does not answer "
                f"({error}); {MANUAL_SETTINGS_HINT}"
            ) from error
        # TPUs without a metadata server, as in hosted notebooks.
        return None
    except (RuntimeError, ValueError, LookupError, TypeError) as error:
        raise InputError(
            f"mesh.coordinator_address: the platform's description of its hosts cannot be read ({error}); "
            f"{MANUAL_SETTINGS_HINT}"
        ) from error
    if address is None or num_processes is None or process_id is None:
        return None
    return None if num_processes == 1 else ClusterMember(address, num_processes, process_id)
