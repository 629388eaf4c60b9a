"""The gauges of `/metrics`, from the router's state at the time of the scrape."""

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from octavo_server.router.observe.state import ORDER, RouterState

if TYPE_CHECKING:
    from octavo_server.router.fleet.prefix_index import PrefixIndex
    from octavo_server.router.observe.metrics.render import Gauges

#: Measured: a hash and its place in a dictionary, masks being shared (benchmarks/prefix_index.py).
ENTRY_BYTES = 110


class IndexInfo(msgspec.Struct, kw_only=True, frozen=True):
    """Sizes of the prefix index of one worker, or the sums over all workers."""

    entries: int = 0
    max_entries: int = 0
    bytes: int = 0
    forgotten: int = 0


def index_info(index: "PrefixIndex") -> IndexInfo:
    return IndexInfo(
        entries=len(index),
        max_entries=index.max_entries,
        bytes=len(index) * ENTRY_BYTES,
        forgotten=index.num_forgotten,
    )


def gauges(state: RouterState, index: IndexInfo) -> "Gauges":
    by_state = Counter(replica.state for replica in state.replicas)
    followed = [replica for replica in state.replicas if replica.epoch is not None]
    diverged = sum(replica.state != "exact" for replica in followed)
    return {
        "inflight": {(): sum(replica.in_flight for replica in state.replicas)},
        "queue_size": {(): state.queue},
        "held_requests": _held(state),
        "endpoints": {(name,): by_state[name] for name in ORDER if name != "gone"},
        "endpoints_cut_off": {(): sum(replica.breaker == "open" for replica in state.replicas)},
        "endpoints_admitted": {(): sum(replica.admitted for replica in state.replicas)},
        "index_blocks": {(): index.entries},
        "index_bytes": {(): index.bytes},
        "index_forgotten_total": {(): index.forgotten},
        "index_divergence_ratio": {(): diverged / len(followed) if followed else 0.0},
    }


def _held(state: RouterState) -> dict[tuple[str, ...], float]:
    """Names that no replica reports share the empty label, as clients may send any name."""
    counts: Counter[tuple[str, ...]] = Counter()
    for model, waiting in state.held.items():
        counts[(model if model in state.models else "",)] += waiting
    return dict(counts)
