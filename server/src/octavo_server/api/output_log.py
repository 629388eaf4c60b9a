"""`OutputLog`: logs the text of each sequence of a request when the sequence ends (`--enable-log-outputs`)."""

import logging
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_engine.frontend.outputs import RequestOutput

logger = logging.getLogger(__name__)


class OutputLog:
    """`max_chars`: most characters of a text in the log. None: no limit."""

    def __init__(self, request_id: str, max_chars: int | None) -> None:
        self._request_id = request_id
        self._max_chars = max_chars
        self._parts: defaultdict[tuple[int, int], list[str]] = defaultdict(list)

    def add(self, prompt_idx: int, output: "RequestOutput") -> None:
        """Add a delta of one prompt."""
        for sequence in output.outputs:
            key = prompt_idx, sequence.index
            self._parts[key].append(sequence.text)
            if sequence.finish_reason is not None:
                text = "".join(self._parts.pop(key))[: self._max_chars]
                logger.info("request %s: output %r, finish reason %s", self._request_id, text, sequence.finish_reason)
