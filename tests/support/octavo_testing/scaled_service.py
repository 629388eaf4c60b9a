"""`ScaledService`: a service that always gets the count that a Recommender recommends."""

from octavo_operator.scaling.behavior import Behavior
from octavo_operator.scaling.proposal import Metric
from octavo_operator.scaling.recommender import Recommendation, Recommender

SYNC_S = 15.0


class ScaledService:
    """Time passes with its syncs only. Its status has the new count at once unless a test says otherwise."""

    def __init__(self, replicas: int, behavior: Behavior, bounds: tuple[int, int]) -> None:
        self.replicas, self.behavior, self.bounds = replicas, behavior, bounds
        self.recommender = Recommender()
        self.now_s = 1000.0

    def sync(self, *metrics: Metric, after_s: float = SYNC_S, status_replicas: int | None = None) -> Recommendation:
        self.now_s += after_s
        found = self.recommender.recommend(
            now_s=self.now_s,
            replicas=self.replicas,
            status_replicas=self.replicas if status_replicas is None else status_replicas,
            min_replicas=self.bounds[0],
            max_replicas=self.bounds[1],
            metrics=metrics,
            behavior=self.behavior,
        )
        self.recommender.record_scaling(
            now_s=self.now_s, before=self.replicas, after=found.replicas, behavior=self.behavior
        )
        self.replicas = found.replicas
        return found
