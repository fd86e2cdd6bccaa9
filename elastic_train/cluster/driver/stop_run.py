"""Ask a run on this cluster to stop, from a process that may be another than its driver's."""

from __future__ import annotations

from contextlib import suppress

import ray
from ray.exceptions import RayError

from elastic_train.cluster.actor_names import NAMESPACE, controller_name, run_key
from elastic_train.config import RunSpec


def ask_to_stop(spec: RunSpec, reason: str) -> bool:
    """At its next step boundary, with a checkpoint. Whether there is a controller that could be asked. Asking
    again is asking once; the storage path of `spec` is absolute."""
    run = run_key(spec.storage_path, spec.name)
    with suppress(ValueError, RayError):  # it is not there yet, or not any more
        ray.get_actor(controller_name(run), NAMESPACE).stop.remote(reason, patient=True)
        return True
    return False
