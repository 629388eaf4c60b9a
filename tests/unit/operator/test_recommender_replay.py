"""The Recommender replays what a real HPA saw, and chooses the same counts from sync to sync.

`hpa_recordings.json` was recorded by tests/cluster/test_recommender_against_hpa.py.
"""

import json
from pathlib import Path

import pytest
from octavo_testing.hpa_recording import Sync, differences
from octavo_testing.load_series import NUM_SYNCS, LoadSeries, load_series

RECORDING = json.loads(Path(__file__).with_name("hpa_recordings.json").read_text())


@pytest.mark.parametrize("series", load_series(), ids=lambda series: series.name)
def test_counts_are_those_of_the_recorded_hpa(series: LoadSeries) -> None:
    syncs = [Sync(*row) for row in RECORDING["series"][series.name]]
    assert len(syncs) > NUM_SYNCS
    assert syncs[-1].time_s - syncs[0].time_s >= 180
    assert differences(series, syncs, sync_s=RECORDING["sync_s"]) == []
