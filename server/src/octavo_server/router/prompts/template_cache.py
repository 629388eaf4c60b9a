"""`TemplateCache`: the text around the contents of a conversation, kept by its roles.

Most templates copy what is said and decide by roles alone. A conversation with known roles is then a matter of putting
its contents into a list of strings; only a new sequence of roles is rendered, with marks for contents (`opaque`).
Where the template may look at what is said, there is no skeleton, and whoever asked renders the conversation itself.
"""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from octavo_engine.text.template import ChatTemplate
from octavo_engine.wire.errors import InvalidRequest

from octavo_server.openai.rendering import RenderOptions, render_conversation
from octavo_server.router.prompts.template_taint import (
    CLOSE,
    EDGE,
    OPEN,
    TemplateInspectsContent,
    content_mark,
    opaque_environment,
)
from octavo_server.router.prompts.two_queue_cache import TwoQueueCache

_MARK = re.compile(f"({EDGE}?){OPEN}([0-9]+){CLOSE}({EDGE}?)")
#: Of which the text around contents must hold none; the last as JSON and Jinja spell the first.
_STRANGE = re.compile(rf"[{EDGE}{OPEN}{CLOSE}]|\\u001f|\\x1f", re.IGNORECASE)
#: By whether the edges are there: what the template did to the ends of a content.
_STRIPS: dict[tuple[bool, bool], Callable[[str], str]] = {
    (True, True): str,
    (False, False): str.strip,
    (False, True): str.lstrip,
    (True, False): str.rstrip,
}
MESSAGE_BYTES = 240


@dataclass(frozen=True, slots=True)
class Skeleton:
    """`parts`: literal text, at odd places to be replaced by a content. `dates`: valid while the clock shows these."""

    parts: list[str]
    contents: tuple[tuple[int, Callable[[str], str]], ...]
    is_plain: bool  # each content once, in order, as it is
    dates: tuple[tuple[str, str], ...]

    def text(self, contents: Sequence[str]) -> tuple[str, int]:
        """And how much of it comes before what was said last."""
        parts = self.parts.copy()
        if self.is_plain:
            parts[1::2] = contents
        else:
            parts[1::2] = [strip(contents[index]) for index, strip in self.contents]
        text = "".join(parts)
        return text, len(text) - sum(map(len, parts[-2:]))

    @property
    def is_of_today(self) -> bool:
        return not self.dates or all(datetime.now().strftime(format) == shown for format, shown in self.dates)


Key = tuple[bytes, tuple[str, ...], tuple[bool, ...]]


def _size(key: Key, skeleton: Skeleton | None) -> int:
    options_key, roles, _ = key
    texts = (*roles, *(skeleton.parts if skeleton is not None else ()))
    return len(options_key) + MESSAGE_BYTES * len(roles) + sum(map(sys.getsizeof, texts))


class TemplateCache:
    def __init__(self, template: ChatTemplate | None, *, max_bytes: int) -> None:
        self._environment = opaque_environment()
        self._known: TwoQueueCache[Key, list[Skeleton | None]] = TwoQueueCache(max_bytes)
        self._template: ChatTemplate | None = None
        if template is not None and _STRANGE.search(template.source) is None:
            try:
                self._template = ChatTemplate(template.source, template.special_tokens, environment=self._environment)
            except TemplateInspectsContent:
                return

    def text(
        self, roles: tuple[str, ...], contents: list[str], *, options: RenderOptions, options_key: bytes
    ) -> tuple[str, int] | None:
        """As `Skeleton.text`; None where it has to be rendered."""
        if self._template is None or options.continue_final_message or any(map(str.isspace, contents)):
            return None
        key = (options_key, roles, tuple(map(bool, contents)))
        known = self._known.get(key)
        if known is None:
            known = [self._made(key, options)]
            self._known.put(key, known, _size(key, known[0]))
        skeleton = known[0]
        if skeleton is not None and not skeleton.is_of_today:
            skeleton = known[0] = self._made(key, options)
        return None if skeleton is None else skeleton.text(contents)

    def _made(self, key: Key, options: RenderOptions) -> Skeleton | None:
        options_key, roles, speaks = key
        if any(map(_STRANGE.search, (options_key.decode(), *roles))):
            return None
        conversation: list[dict[str, Any]] = [
            {"role": role, "content": content_mark(i) if speaks[i] else ""} for i, role in enumerate(roles)
        ]
        try:
            self._environment.dates.shown.clear()
            text = render_conversation(self._template, conversation, options)
            dates = tuple(self._environment.dates.shown.items())
        except (TemplateInspectsContent, InvalidRequest):
            return None
        return _taken_apart(text, len(roles), dates)


def _taken_apart(text: str, num_messages: int, dates: tuple[tuple[str, str], ...]) -> Skeleton | None:
    pieces = _MARK.split(text)
    literals, marks = pieces[::4], list(zip(pieces[1::4], pieces[2::4], pieces[3::4], strict=True))
    if any(map(_STRANGE.search, literals)):
        return None
    contents = tuple((int(index), _STRIPS[bool(left), bool(right)]) for left, index, right in marks)
    parts = [""] * (2 * len(literals) - 1)
    parts[::2] = literals
    is_plain = contents == tuple((i, str) for i in range(num_messages))
    return Skeleton(parts, contents, is_plain, dates)
