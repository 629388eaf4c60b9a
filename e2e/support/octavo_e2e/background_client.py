"""`BackgroundClient`: sends requests while a test changes the cluster, and records failures."""

from threading import Condition, Thread
from types import TracebackType
from typing import Self

from httpx2 import HTTPError
from openai import OpenAIError

from octavo_e2e.cluster import Cluster

END_S = 90


class BackgroundClient:
    """Sends one request after the other to the service `model`; on exit asserts that no response failed."""

    def __init__(self, cluster: Cluster, host: str, namespace: str, model: str):
        self._cluster = cluster
        self._host = host
        self._model = model
        self._address = cluster.direct_url(namespace, model)
        self._thread = Thread(target=self._ask, name="background client")
        self._changed = Condition()
        self._is_ending = False
        self._num_responses = 0
        self._failures: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._is_ending = True
        self._thread.join(END_S)
        if error is None:
            assert not self._thread.is_alive(), f"a request got no response within {END_S} s"
            assert not self._failures, f"{len(self._failures)} of {self._num_responses} failed: {self._failures[:5]}"

    def wait_for_responses(self, more: int, *, within_s: float) -> None:
        """Wait for this number of further responses."""
        with self._changed:
            wanted = self._num_responses + more
            assert self._changed.wait_for(lambda: self._num_responses >= wanted, within_s), (
                "the endpoint sends no responses"
            )

    def _ask(self) -> None:
        while not self._is_ending:
            failure = self._failure()
            with self._changed:
                self._num_responses += 1
                self._failures += [failure] if failure else []
                self._changed.notify_all()

    def _failure(self) -> str:
        try:
            answer = self._cluster.ask(self._host, self._model, at=self._address)
        except (OpenAIError, HTTPError) as error:  # HTTPError: an incomplete response
            return repr(error)
        return "" if answer else "an empty response"
