"""Replicas in the state exact, and routing decisions, for tests of reports, metrics and logs."""

from octavo_server.kv.frames import Hello, Snapshot
from octavo_server.router.balance.decision import CandidateCost, Decision, Rung
from octavo_server.router.fleet.block_mirror import BlockMirror
from octavo_server.router.fleet.endpoint import Endpoint
from octavo_server.router.fleet.prefix_index import Match, PrefixIndex
from octavo_server.router.fleet.replica import Replica
from octavo_server.router.prompts.prompt import Prompt

PROMPT = Prompt(num_tokens=100, affinity=7, hashes=tuple(range(6)), is_exact=True)


def exact_replica(name: str, index: PrefixIndex, *, epoch: int = 1, model: str = "tiny") -> Replica:
    """Return a replica with an empty snapshot."""
    replica = Replica(Endpoint(f"http://{name}:8000", name))
    replica.blocks = blocks = BlockMirror(index)
    replica.hello = Hello(
        version=1, epoch=epoch, block_size=16, root=b"r" * 32, max_model_len=512, models=[model], heartbeat_s=1.0
    )
    blocks.feed(replica.hello)
    blocks.feed(Snapshot(epoch=epoch, seq=0, digest=0, load=blocks.load))
    replica.admitted_epoch = epoch
    replica.models = frozenset({model})
    replica.state = "exact"
    return replica


def decision(*replicas: Replica, expected_tokens: int = 64, rung: Rung = "exact") -> Decision:
    """Return a decision for the first of these replicas."""
    terms = [
        CandidateCost(replica, Match(4 if position == 0 else 0), 0.010 * (position + 1), 0.002, 0.0, 0.001)
        for position, replica in enumerate(replicas)
    ]
    return Decision(replicas[0], rung, "least cost", tuple(terms), expected_tokens)
