"""The operator's Recommender chooses the counts of a real HorizontalPodAutoscaler, for the same loads and times.

The short test runs half of each series at a sync of 2 s. With LONG=1 another one runs them at 5 s, for more than three
minutes.
Its recording with --update-golden is what tests/unit/operator/test_recommender_replay.py replays without a cluster.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from octavo_testing.control_plane import HPA, control_plane, missing_tools
from octavo_testing.hpa_recording import HpaRecorder, differences, record_hpas
from octavo_testing.load_series import NUM_SYNCS, load_series
from octavo_testing.run_length import LONG
from octavo_testing.waiting import eventually

RECORDING = Path(__file__).parents[1] / "unit" / "operator" / "hpa_recordings.json"
NAMESPACE = "series"
START_S = 60  # until the HPA controller has found the resources and the metrics API


def _record(folder: Path, sync_s: int, num_syncs: int = NUM_SYNCS) -> HpaRecorder:
    if missing := missing_tools():
        pytest.skip(missing)
    series = [replace(one, sums=one.sums[:num_syncs]) for one in load_series()]
    with control_plane(folder, audit=True, controllers=(HPA,), hpa_sync_s=sync_s) as plane:
        plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        with record_hpas(plane, NAMESPACE, folder, series, sync_s=sync_s) as recorder:
            eventually(
                lambda: recorder.is_complete,
                within_s=START_S + 1.5 * sync_s * num_syncs,
                describe=lambda: str({name: len(syncs) for name, syncs in recorder.syncs.items()}),
            )
        recorder.add_scale_times()
    return recorder


def _faults(recorder: HpaRecorder) -> list[str]:
    """Return the differences that the clocks do not explain; print all, and the counts."""
    found = []
    for series in load_series():
        syncs = recorder.syncs[series.name]
        print(f"{series.name}: {[sync.replicas for sync in syncs]}")
        found += differences(series, syncs, sync_s=recorder.sync_s)
    print(*found, sep="\n")
    return [text for text in found if text.startswith("fault")]


def test_counts_equal_those_of_an_hpa(tmp_path: Path) -> None:
    recorder = _record(tmp_path, sync_s=2, num_syncs=NUM_SYNCS // 2)
    assert _faults(recorder) == []


@pytest.mark.skipif(not LONG, reason="takes more than three minutes; LONG=1 runs it")
def test_counts_equal_those_of_an_hpa_for_three_minutes(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    recorder = _record(tmp_path, sync_s=5)
    if request.config.getoption("--update-golden"):
        RECORDING.write_text(recorder.document())
    assert all(syncs[-1].time_s - syncs[0].time_s >= 180 for syncs in recorder.syncs.values())
    assert _faults(recorder) == []
