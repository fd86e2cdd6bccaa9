"""The Grafana dashboard against the types that Grafana publishes for its dashboards and panels.

Grafana itself is in none of the registries that the tests may ask; these types are what its own code is
checked against. What the dashboard asks is put to a real Prometheus elsewhere.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

MODULES = os.environ.get("GRAFANA_SCHEMA", "")
MISSING = "GRAFANA_SCHEMA names no node_modules with @grafana/schema and typescript (npm)"
pytestmark = [
    pytest.mark.ring1,
    pytest.mark.matrix,
    pytest.mark.skipif(not MODULES, reason=MISSING),
]
DASHBOARD: dict[str, Any] = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
RAW = "@grafana/schema/dist/esm/raw/composable"
PANELS = {"stat": "StatPanelCfg", "timeseries": "TimeSeriesPanelCfg"}
HEAD = f"""
import type {{ Dashboard, GraphFieldConfig, Panel }} from '@grafana/schema';
import type {{ Options as stat }} from '{RAW}/stat/panelcfg/x/StatPanelCfg_types.gen';
import type {{ Options as timeseries }} from '{RAW}/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';
// Enumerations are their strings in JSON. What a panel leaves out gets its default; inner objects are whole.
type Said<T> = T extends string ? `${{T}}` : T extends (infer U)[] ? Said<U>[]
  : T extends object ? {{ [K in keyof T]: Said<T[K]> }} : T;
"""


def problems(dashboard: dict[str, Any], where: Path) -> list[str]:
    """What TypeScript finds wrong."""
    panels = dashboard["panels"]
    assert {panel["type"] for panel in panels} <= {*PANELS}
    frame = {name: value for name, value in dashboard.items() if name != "panels"}
    lines = [HEAD, f"export const frame: Said<Dashboard> = {json.dumps(frame)};"]
    for number, panel in enumerate(panels):
        kind, custom = panel["type"], panel["fieldConfig"]["defaults"].get("custom", {})
        lines.append(f"export const p{number}: Said<Panel> = {json.dumps(panel)};")
        lines.append(f"export const o{number}: Said<Partial<{kind}>> = {json.dumps(panel['options'])};")
        lines.append(f"export const c{number}: Said<Partial<GraphFieldConfig>> = {json.dumps(custom)};")
    where.mkdir()
    (where / "node_modules").symlink_to(Path(MODULES).resolve())
    (where / "dashboard.ts").write_text("\n".join(lines))
    options = [
        "--noEmit",
        "--strict",
        "--skipLibCheck",
        "--module",
        "esnext",
        "--moduleResolution",
        "bundler",
    ]
    done = subprocess.run(
        ["node", "node_modules/typescript/bin/tsc", *options, "dashboard.ts"],
        cwd=where,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    return done.stdout.splitlines()


def test_the_dashboard_fits_the_types_that_grafana_publishes(tmp_path: Path) -> None:
    assert problems(DASHBOARD, tmp_path / "as_it_is") == []


def test_a_dashboard_that_does_not_fit_is_found(tmp_path: Path) -> None:
    broken = copy.deepcopy(DASHBOARD)
    broken["panels"][0]["options"]["colorMode"] = "colourful"
    broken["panels"][1]["gridPos"]["x"] = "left"
    del broken["panels"][-1]["options"]["legend"]["showLegend"]
    broken["refresh"] = 10
    assert len(problems(broken, tmp_path / "broken")) == 4


def test_every_panel_has_a_place_of_its_own() -> None:
    taken = [
        (x, y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
