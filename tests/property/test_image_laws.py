"""The laws of the scheduler (`SchedulerMachine`) for requests with images that do not all fit into the encoder cache.

The executor asserts that no chunk has tokens of an image without rows. Each history is a trace, which must replay.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from octavo_engine.core.replay import replay
from octavo_engine.core.trace import TracingScheduler
from octavo_engine.loop.engine_core import Proposer
from octavo_engine.wire.plan import StepCosts
from octavo_engine.wire.records import ErrorInfo
from octavo_testing.scheduler_machine import SchedulerMachine, configs, costs, proposers
from octavo_testing.simulation import Simulation, sim_config

#: Images have a length each, since a digest decides the number of tokens.
LENGTHS = {b"a": 5, b"b": 2, b"c": 6, b"d": 3}
#: Lengths of the texts before images, and the names of these.
images = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([*LENGTHS])), min_size=1, max_size=4)


def place(drawn: list[tuple[int, bytes]]) -> tuple[tuple[int, int, bytes], ...]:
    """Put images behind each other; return their starts, lengths and names."""
    placed, end = list[tuple[int, int, bytes]](), 0
    for gap, name in drawn:
        placed.append((end + gap, LENGTHS[name], name))
        end += gap + LENGTHS[name]
    return tuple(placed)


class ImageMachine(SchedulerMachine):
    @initialize(config=configs, costs=costs, proposer=proposers, image_token_s=st.sampled_from([0.0, 0.0001, 0.5]))
    def start(
        self, config: dict[str, object], costs: StepCosts, proposer: Proposer | None, image_token_s: float
    ) -> None:
        if not config["enable_chunked_prefill"]:
            config["max_num_batched_tokens"] = config["max_model_len"]
        self.lines: list[str] = []
        traced = TracingScheduler(sim_config(debug_invariants=False, **config), self.lines.append, kv_tokens=True)
        costs.image_token_s = image_token_s
        self.prepare(Simulation(scheduler=traced, costs=costs, proposer=proposer))

    @rule(drawn=images, salt=st.sampled_from(["", "", "", "s"]), n=st.sampled_from([1, 1, 2]), tenant=st.integers(0, 1))
    def add_images(self, drawn: list[tuple[int, bytes]], salt: str, n: int, tenant: int) -> None:
        fields = {"salt": salt, "n": n, "max_tokens": 3, "tenant": "b" * tenant, "images": place(drawn)}
        start, length, _ = fields["images"][-1]
        self.add_request(0, start + length + 1, fields)

    @precondition(lambda self: any(result.seqs and not result.error for result in self.sim.results))
    @rule(data=st.data())
    def fail_sequence(self, data: st.DataObject) -> None:
        """Let a sequence of a step in flight fail, as one whose image has no rows does."""
        found = [result for step in self.sim.results for result in step.seqs]
        result = data.draw(st.sampled_from(found))
        result.token_ids, result.prompt_logprobs, result.error = [], None, ErrorInfo("the tower broke")

    @invariant()
    def size_is_kept(self) -> None:
        if hasattr(self, "sim"):
            lengths = [image.length for asked in self.sim.requests.values() for image in asked.images]
            assert self.sim.executor.most_rows <= max([self.sim.config.max_num_batched_tokens, *lengths])

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "sim"):
            assert self.sim.scheduler.stats().encoded_images == self.sim.executor.num_encoded
            report = replay(self.lines)
            assert report.ok, str(report)


TestImages = ImageMachine.TestCase
TestImages.settings = settings(stateful_step_count=30)
