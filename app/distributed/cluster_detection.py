"""Which hosts the platform says there are. The one place that asks JAX's own detection, which is not public."""

from __future__ import annotations

from jax._src import cloud_tpu_init
from jax._src.clusters import ClusterEnv

from app.distributed.rendezvous import ClusterMember
from settings.errors import InputError

MANUAL_SETTINGS_HINT = "set mesh.coordinator_address, mesh.num_processes and mesh.process_id instead"


def is_cloud_tpu_vm() -> bool:
    """Whether this machine has TPUs and the library for them. Touches no device and asks nobody."""
    return cloud_tpu_init.running_in_cloud_tpu_vm


def detect_cluster(*, timeout_s: int, required: bool = False) -> ClusterMember | None:
    """This host among those of Cloud TPU, Slurm, Open MPI or Kubernetes; None where nobody knows of others.

    Args:
        must: a platform that does not answer is an error.

    Raises:
        InputError: the platform tells of hosts, but not all that is needed to join them; it must answer and does not.
    """
    try:
        address, num_processes, process_id, _ = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, timeout_s
        )
    except OSError as error:
        if required:
            raise InputError(
                f"mesh.coordinator_address: auto, and the platform does not answer ({error}); {MANUAL_SETTINGS_HINT}"
            ) from error
        # TPUs without a metadata server, as in hosted notebooks: nobody to ask.
        return None
    except (RuntimeError, ValueError, LookupError, TypeError) as error:
        raise InputError(
            f"mesh.coordinator_address: the platform's account of its hosts cannot be read ({error}); "
            f"{MANUAL_SETTINGS_HINT}"
        ) from error
    if address is None or num_processes is None or process_id is None:
        return None
    return None if num_processes == 1 else ClusterMember(address, num_processes, process_id)
