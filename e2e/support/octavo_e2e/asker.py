"""`Asker`: asks the endpoint again and again while a test does something to the cluster, and remembers what failed."""

from threading import Condition, Thread
from types import TracebackType
from typing import Self

from httpx2 import HTTPError
from openai import OpenAIError

from octavo_e2e.cluster import Cluster

END_S = 90


class Asker:
    """Asks `model` of its namespace's service of this name. On leaving: every answer was whole. One at a time."""

    def __init__(self, cluster: Cluster, host: str, namespace: str, model: str):
        self._cluster = cluster
        self._host = host
        self._model = model
        self._address = cluster.nearest(namespace, model)
        self._thread = Thread(target=self._ask, name="asker")
        self._changed = Condition()
        self._is_ending = False
        self._num_answers = 0
        self._failures: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._is_ending = True
        self._thread.join(END_S)
        if error is None:
            assert not self._thread.is_alive(), f"a question wasn't answered within {END_S} s"
            assert not self._failures, f"{len(self._failures)} of {self._num_answers} failed: {self._failures[:5]}"

    def until_answers(self, more: int, *, within_s: float) -> None:
        """So many more than there are now."""
        with self._changed:
            wanted = self._num_answers + more
            assert self._changed.wait_for(lambda: self._num_answers >= wanted, within_s), "the endpoint stands still"

    def _ask(self) -> None:
        while not self._is_ending:
            failure = self._failure()
            with self._changed:
                self._num_answers += 1
                self._failures += [failure] if failure else []
                self._changed.notify_all()

    def _failure(self) -> str:
        try:
            answer = self._cluster.ask(self._host, self._model, at=self._address)
        except (OpenAIError, HTTPError) as error:  # the latter: an answer that breaks off
            return repr(error)
        return "" if answer else "an empty answer"
