"""`DecisionLog`: the latest decisions, and what became of them. Kept as they are; rendered only when somebody asks.

Those that have ended are kept apart, numbered in the order of their ends: so whoever follows them can ask for what came
after what they have heard, gets each, however long its request took, and sees by a gap what nobody keeps any more.
"""

import random
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_server.router.balance.decision import Decision
    from octavo_server.router.prompts.prompt import Prompt

KEPT = 256


class Entry:
    """One decision; a request that is sent anew has several. `decided_s`: by the clock of the tracks. `number`: of
    its end, 0 before.

    Holds numbers of the prompt, never its text or hashes: decisions outlive requests.
    """

    __slots__ = (
        *("attempt", "cached_tokens", "code", "decided_s", "decision", "decision_s", "is_exact", "model", "number"),
        *("num_prompt_blocks", "num_prompt_tokens", "reason", "request_id", "ttft_s"),
    )

    def __init__(self, request_id: str, model: str, attempt: int, prompt: "Prompt", decision: "Decision") -> None:
        self.request_id = request_id
        self.model = model
        self.attempt = attempt
        self.decision = decision
        self.num_prompt_tokens = prompt.num_tokens
        self.num_prompt_blocks = len(prompt.hashes)
        self.is_exact = prompt.is_exact
        self.decided_s = self.decision_s = 0.0
        self.cached_tokens: int | None = None  # as the engine reported
        self.ttft_s: float | None = None
        self.code: int | None = None
        self.reason: str | None = None  # how it ended
        self.number = 0


class DecisionLog:
    """`worker`: whose numbers these are; another one in each process, also after a restart."""

    def __init__(self, max_entries: int = KEPT) -> None:
        self.worker = f"{random.getrandbits(64):016x}"
        self._entries: deque[Entry] = deque(maxlen=max_entries)
        self._ended: deque[Entry] = deque(maxlen=max_entries)
        self._num_ended = 0
        self.add = self._entries.append

    def end(self, entry: Entry) -> None:
        """Once for each: an attempt that failed, when it is told, whatever becomes of its request."""
        if not entry.number:
            self._num_ended += 1
            entry.number = self._num_ended
            self._ended.append(entry)

    def ended_after(self, number: int) -> Iterator[Entry]:
        """The first to end first."""
        return (entry for entry in self._ended if entry.number > number)

    def latest(self, limit: int) -> Iterator[Entry]:
        """The newest first."""
        for position, entry in enumerate(reversed(self._entries)):
            if position == limit:
                return
            yield entry
