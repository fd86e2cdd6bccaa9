from __future__ import annotations

import json

import pytest

from elastic_train.control.fault_schedule import storm
from elastic_train.observe.journal_records import from_json, to_json, wall_text

pytestmark = pytest.mark.ring0


@pytest.mark.parametrize("seed", range(4))
def test_records_survive_json_exactly(recorded, seed):
    faults = storm(seed, steps=15, nodes=("a", "b", "c", "d"), ranks=4, faults=4).faults
    records = recorded(*faults, seed=seed)
    assert [from_json(json.loads(json.dumps(to_json(r), allow_nan=False))) for r in records] == records


def test_what_was_decided_is_in_the_record(recorded):
    records = recorded()
    (formed,) = [r for r in records if r.formed]
    assert (formed.phase, formed.commands) == ("forming", ("Form",))
    assert formed.formed.plan == "dp_shard 4 on 4 nodes"
    assert (formed.formed.source, formed.formed.step, formed.formed.dp) == ("fresh", 0, 4)
    assert records[-1].ended == ("finished", "all 15 steps are committed and saved")


def test_wall_times_keep_milliseconds():
    assert wall_text(1.25) == "1970-01-01T00:00:01.250+00:00"
