"""Where plans are carried out. `submit` returns a future, so that several plans may be in flight on other executors.

`LocalExecutor` is the case of one process: it runs the plan before it returns, on the caller's thread, since the
threads that compute are the kernels' own.
"""

from concurrent.futures import Future
from typing import Protocol, cast

from octavo_engine.grammar.compiler import GrammarCompiler
from octavo_engine.runner.runner import Runner
from octavo_engine.wire.plan import StepPlan, StepResult


class Executor(Protocol):
    def submit(self, plan: StepPlan) -> "Future[StepResult]":
        """Plans are carried out in the order of submission. The future fails only if the executor is lost."""
        ...

    def prepare(self, grammar: str) -> "Future[object]":
        """Done when plans may hold sequences with this grammar, for as long as somebody holds the result."""
        ...

    def shutdown(self) -> None: ...


class LocalExecutor:
    def __init__(self, runner: Runner, grammars: GrammarCompiler) -> None:
        self._runner: Runner | None = runner
        self._grammars = grammars

    def submit(self, plan: StepPlan) -> "Future[StepResult]":
        future: Future[StepResult] = Future()
        if self._runner is None:
            future.set_exception(RuntimeError("the executor has been shut down"))
        else:
            future.set_result(self._runner.run(plan))
        return future

    def prepare(self, grammar: str) -> "Future[object]":
        return cast("Future[object]", self._grammars.submit(grammar))

    def shutdown(self) -> None:
        """Lets the weights and the KV cache go."""
        self._runner = None
        self._grammars.shutdown()
