"""Memory is interleaved over the nodes of the threads' CPUs, if there are several; the call itself is tried here."""

import threading
from pathlib import Path

import pytest
from octavo_engine.runner import numa
from octavo_engine.runner.numa import interleave_memory, nodes_to_interleave

TWO = {0: "0-3,8-11", 1: "4-7,12-15"}


def tree(root: Path, cpus_by_node: dict[int, str], allowed: str) -> Path:
    for node, cpus in cpus_by_node.items():
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/status").write_text(f"Name:\tpython\nMems_allowed:\t3\nMems_allowed_list:\t{allowed}\n")
    return root


@pytest.mark.parametrize(
    ("cpus_by_node", "allowed", "cpus", "nodes"),
    [
        ({0: "0-3"}, "0", {0, 1, 2, 3}, set()),
        (TWO, "0-1", set(range(16)), {0, 1}),
        (TWO, "0-1", {0, 4}, {0, 1}),
        (TWO, "0-1", {0, 1, 8}, set()),
        (TWO, "0", set(range(16)), set()),
        ({**TWO, 2: ""}, "0-2", set(range(16)), {0, 1}),
        ({}, "0", {0}, set()),
    ],
    ids=["one node", "two", "a thread on each", "threads on one", "memory of one", "a node without CPUs", "no sysfs"],
)
def test_nodes_of_the_threads_are_interleaved(
    cpus_by_node: dict[int, str], allowed: str, cpus: set[int], nodes: set[int], tmp_path: Path
) -> None:
    assert nodes_to_interleave(cpus, tree(tmp_path, cpus_by_node, allowed)) == nodes


def test_nothing_is_changed_on_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa.ctypes, "CDLL", None)
    interleave_memory(frozenset())


def test_the_outcome_of_the_call_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Node 1000 does not exist, so its call fails. The policy ends with its thread."""
    caplog.set_level("INFO", logger="octavo_engine")
    for nodes in (frozenset({0}), frozenset({1000})):
        thread = threading.Thread(target=interleave_memory, args=(nodes,))
        thread.start()
        thread.join()
    assert [record.message.count("NUMA nodes") for record in caplog.records] == [1, 1]
    assert caplog.records[1].levelname == "WARNING"
