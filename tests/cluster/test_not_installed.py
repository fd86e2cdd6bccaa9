"""A cluster whose Python does not have the package: the working directory of a job brings it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elastic_train.cli.exit_codes import FINISHED
from elastic_train.testing.ray_processes import RayProcesses
from tests.cluster.conftest import Jobs, environment_of

pytestmark = [pytest.mark.ring3, pytest.mark.matrix, pytest.mark.timeout(400)]
STEPS = 6


def without_the_package(home: Path) -> dict[str, str]:
    """An environment in which what is installed is there but for the package."""
    there = [place for place in sys.path if (Path(place) / "elastic_train" / "__init__.py").is_file()]
    if any(place.endswith("-packages") for place in there):
        pytest.skip("the package is installed among the others, and can't be hidden")
    home.mkdir()
    hides = f"import sys\nsys.path[:] = [place for place in sys.path if place not in {there!r}]\n"
    (home / "sitecustomize.py").write_text(hides)
    return environment_of(home) | {"PYTHONPATH": str(home)}


def test_a_working_directory_brings_the_package_to_driver_controller_and_workers(tmp_path: Path) -> None:
    environment = without_the_package(tmp_path / "home")
    ask = [sys.executable, "-c", "import ray, elastic_train"]
    said = subprocess.run(ask, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "No module named 'elastic_train'" in said.stderr
    with RayProcesses(environment, head_cpus=2) as cluster:
        jobs = Jobs(cluster, tmp_path / "runs")
        few = ("--max-steps", str(STEPS), "--workers", "2:2", "--standby", "0")
        jobs.submit("brought", *few, "--name", "brought")
        assert jobs.code("brought") == FINISHED, jobs.log("brought")
        assert sorted(jobs.ledger("brought").losses) == [*range(1, STEPS + 1)]
