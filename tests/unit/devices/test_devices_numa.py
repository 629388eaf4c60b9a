"""Memory is interleaved over the nodes of the threads' CPUs, if there are several; the call itself is tried here."""

import threading
from pathlib import Path

import pytest
from octavo_engine.devices import cpu_threads
from octavo_engine.devices.cpu_threads import interleave_memory, node_of_rank, nodes_to_interleave

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


HYPERTHREADS = {cpu: f"{cpu % 8},{cpu % 8 + 8}" for cpu in range(16)}


@pytest.mark.parametrize(
    ("cpus_by_node", "allowed", "affinity", "num_threads", "nodes"),
    [
        (TWO, "0-1", set(range(16)), 4, [{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}]),
        (TWO, "0-1", {2, 3, 4, 12, 5}, 2, [{2, 3}, {4, 12, 5}]),
        (TWO, "0-1", {2, 3, 4, 12}, 2, None),
        (TWO, "0-1", set(range(16)), 5, None),
        (TWO, "0", set(range(16)), 1, None),
        (TWO, "0-1", {0, 1}, 1, None),
        ({0: "0-15"}, "0", set(range(16)), 8, None),
        ({**TWO, 2: "16-19"}, "0-2", {0, 4, 5, 16, 17}, 2, [{4, 5}, {16, 17}]),
        ({**TWO, 10: "16", 2: "17"}, "0-10", {0, 4, 16, 17}, 1, [{0}, {4}]),
        ({}, "0", {0, 1}, 1, None),
    ],
    ids=[
        *("two", "a few CPUs of a pod", "hyperthreads are one core", "more threads than cores", "memory of one node"),
        *("CPUs of one node", "one node", "nodes with enough CPUs", "in order of their numbers", "no sysfs"),
    ],
)
def test_each_rank_gets_a_node_of_its_own(
    cpus_by_node: dict[int, str],
    allowed: str,
    affinity: set[int],
    num_threads: int,
    nodes: list[set[int]] | None,
    tmp_path: Path,
) -> None:
    root = tree(tmp_path, cpus_by_node, allowed)
    for cpu, siblings in HYPERTHREADS.items():
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    found = [node_of_rank(rank, 2, num_threads=num_threads, affinity=affinity, root=root) for rank in range(2)]
    assert found == (nodes or [None, None])


def test_nothing_is_changed_on_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads.ctypes, "CDLL", None)
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
