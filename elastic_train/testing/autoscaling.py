"""A Ray cluster that grows and shrinks by itself: Ray's autoscaler, processes of this machine as nodes."""

from __future__ import annotations

import json
import secrets
import signal
from collections.abc import Mapping
from typing import Any

import psutil
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FakeMultiNodeProvider

from elastic_train.testing.ray_processes import RayProcesses, commands_below, end_tree

NODE_TYPE = "worker"
NOTHING_TO_RUN = (
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
    "cluster_synced_files",
    "rsync_exclude",
    "rsync_filter",
)


class Provider(FakeMultiNodeProvider):
    """Starts nodes as processes of the autoscaler. Their ids are random, as real ones are, not counted."""

    def _next_hex_node_id(self) -> str:
        return secrets.token_hex(len(FAKE_HEAD_NODE_ID) // 2)


class AutoscalingRay(RayProcesses):
    """A head without CPUs, and between `least` and `most` nodes of one CPU, as many as are asked for."""

    def __init__(
        self, environment: Mapping[str, str], *, least: int, most: int, idle_minutes: float = 0.1
    ) -> None:
        self._least, self._most, self._idle_minutes = least, most, idle_minutes
        super().__init__(
            {
                **environment,
                "AUTOSCALER_UPDATE_INTERVAL_S": "1",
                "RAY_FAKE_CLUSTER": "1",
                "RAY_enable_autoscaler_v2": "1",
                "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
                "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
            }
        )

    def kill(self, socket_name: str) -> None:
        """SIGKILL all processes of a node, which is known by its raylet's socket in `ray.nodes()`."""
        assert self.head is not None
        for pid, command in commands_below(self.head).items():
            if command and command[0].endswith("raylet/raylet") and any(socket_name in c for c in command):
                end_tree(psutil.Process(pid), signal.SIGKILL)
                return
        raise psutil.NoSuchProcess(0, socket_name)

    def _head_options(self) -> tuple[str, ...]:
        path = self._directory / "autoscaler.json"
        path.write_text(json.dumps(self._config()))
        return (f"--autoscaling-config={path}",)

    def _config(self) -> dict[str, Any]:
        node = {"resources": {"CPU": 1}, "node_config": {}}
        return {
            "cluster_name": "local",
            "max_workers": self._most,
            "upscaling_speed": 10.0,
            "idle_timeout_minutes": self._idle_minutes,
            "provider": {
                "type": "external",
                "module": f"{Provider.__module__}.{Provider.__name__}",
                "use_node_id_as_ip": True,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
                "launch_multiple": True,
                "head_node_id": FAKE_HEAD_NODE_ID,
                "gcs_address": self.address,
            },
            "head_node_type": "ray.head.default",
            "available_node_types": {
                "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
                NODE_TYPE: {**node, "min_workers": self._least, "max_workers": self._most},
            },
            "auth": {},
            "docker": {},
            "file_mounts": {},
            "file_mounts_sync_continuously": False,
            **{name: [] for name in NOTHING_TO_RUN},
        }
