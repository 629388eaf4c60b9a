"""All policies by name, in the order of the tables."""

from collections.abc import Callable

from router_sim import baselines, peers
from router_sim.octavo import Octavo
from router_sim.perfect_knowledge import PerfectKnowledge
from router_sim.router_view import Policy, RouterView

POLICIES: dict[str, Callable[[RouterView], Policy]] = {
    "octavo": Octavo,
    "random": baselines.Random,
    "round-robin": baselines.RoundRobin,
    "least-load": baselines.LeastLoad,
    "chwbl": baselines.BoundedRing,
    "sglang": peers.SGLang,
    "llm-d": peers.LLMD,
    "llm-d-exact": peers.LLMDExact,
    "loadaware": peers.LoadAware,
    "dynamo": peers.Dynamo,
    "aware": PerfectKnowledge,
}
