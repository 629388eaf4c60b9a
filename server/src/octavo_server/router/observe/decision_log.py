"""`DecisionLog`: the latest decisions and the outcomes of their requests.

Ended decisions are also stored in the order of their ends, with a number. A client that follows them requests the
decisions after the last number it has; a gap in the numbers shows that decisions were dropped in between.
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
    """One decision; a retried request has several. `decided_s`: time by the router's clock. `number`: position
    among the decisions that have ended, 0 while it hasn't ended.

    An entry holds sizes of the prompt, never its text or hashes, as entries outlive requests.
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
        self.cached_tokens: int | None = None  # reported by the engine
        self.ttft_s: float | None = None
        self.code: int | None = None
        self.reason: str | None = None  # why the attempt or the request ended
        self.number = 0


class DecisionLog:
    """`worker` identifies the process that assigns the numbers; it is different after each start."""

    def __init__(self, max_entries: int = KEPT) -> None:
        self.worker = f"{random.getrandbits(64):016x}"
        self._entries: deque[Entry] = deque(maxlen=max_entries)
        self._ended: deque[Entry] = deque(maxlen=max_entries)
        self._num_ended = 0
        self.add = self._entries.append

    def end(self, entry: Entry) -> None:
        """Give the decision of an attempt that ended the next number, also before a retry. Later calls do nothing."""
        if not entry.number:
            self._num_ended += 1
            entry.number = self._num_ended
            self._ended.append(entry)

    def ended_after(self, number: int) -> Iterator[Entry]:
        return (entry for entry in self._ended if entry.number > number)

    def latest(self, limit: int) -> Iterator[Entry]:
        for position, entry in enumerate(reversed(self._entries)):
            if position == limit:
                return
            yield entry
