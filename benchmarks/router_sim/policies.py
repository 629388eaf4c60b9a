"""Every policy by its name, in the order in which they are shown."""

from collections.abc import Callable

from router_sim import baselines, peers
from router_sim.aware import Aware
from router_sim.octavo import Octavo
from router_sim.site import Policy, Site

POLICIES: dict[str, Callable[[Site], Policy]] = {
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
    "aware": Aware,
}
