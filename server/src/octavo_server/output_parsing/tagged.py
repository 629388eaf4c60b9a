"""Formats in which each argument of a call stands in a tag: `<function=f><parameter=a>1</parameter></function>`.

One parser serves all of them, by rows of the texts that they use. The tool's schema gives the type of an argument: a
string stays as the model wrote it and is emitted as it arrives; any other value is emitted once it is complete.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from octavo_server.output_parsing.argument_types import ANY, STRING, ArgumentValue, Schema, Types, types_of
from octavo_server.output_parsing.streaming_parser import Steps
from octavo_server.output_parsing.tool_call_parser import ToolCallParser

_NAME = re.compile(r"[\w.-]*")
_KEY = re.compile(r"""[^<>"'\n]*""")
_QUOTES = re.compile(r"""["']*""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """Texts of a format. White space may stand between them, and quotes around names.

    `start`, `end`: around calls; empty if calls stand alone. `call`, `named`: around the name of a tool. `key`,
    `value`: before the name of a parameter, and between it and the value. `fillers`: texts without meaning between
    calls. `marks`: attributes of a string and of any other value. `wrapper`: texts that may stand around a value.
    `own_lines`: a newline at each end of a value belongs to the format. `tokens`: special tokens that are only parts
    of these texts."""

    start: str = ""
    end: str = ""
    call: str
    named: str = ">"
    key: str
    value: tuple[str, ...] = (">",)
    value_end: str
    call_end: str
    fillers: tuple[str, ...] = ()
    marks: tuple[str, str] | tuple[()] = ()
    wrapper: tuple[str, str] | tuple[()] = ()
    own_lines: bool = False
    tokens: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        texts = (self.start, self.end, self.call, self.named, self.key, *self.value, self.value_end, self.call_end)
        return tuple(text for text in (*texts, *self.fillers, *self.tokens) if len(text) > 1)


class TaggedParser(ToolCallParser):
    """`rows`: variants of one format. A call outside `start` and `end` needs the name of a tool."""

    rows: ClassVar[tuple[Tags, ...]] = ()
    _tags: Tags
    _ends: tuple[str, ...] = ()  # end of the latest block, if it has not come yet

    def parse_calls(self) -> Steps[None]:
        starts = [text for tags in self.rows for text in (tags.start, tags.call) if text]
        while marker := (yield from self.emit_text_until(*starts, *self._ends)):
            if marker in self._ends:
                self._ends = ()
                continue
            self._tags = next(tags for tags in self.rows if marker in (tags.start, tags.call))
            if not (yield from self._parse_block(any_name=marker == self._tags.start)):
                self.reject_call(len(marker))

    def _parse_block(self, *, any_name: bool) -> Steps[bool]:
        """Parse the calls that follow a marker; return False, and keep the text, if there is none."""
        num_before, self._ends = self.num_calls, ()
        is_call = not any_name or (yield from self._next_call())
        while is_call and (yield from self._parse_call(any_name)):
            self._ends = (self._tags.end,) if self._tags.end else ()
            is_call = yield from self._next_call()
        if self.num_calls == num_before:
            return False
        self._pos = self._kept
        return True

    def _next_call(self) -> Steps[bool]:
        """Consume the text before the name of the next call, or else the end of the block, and return whether there is
        a call."""
        while True:
            yield from self.skip_space()
            if (yield from self.accept_token(self._tags.call)):
                return True
            skipped = yield from self._accept_any(*self._tags.fillers, *self._ends)
            if not skipped:
                return False
            if self._ends:
                self.commit()
            if skipped in self._ends:
                self._ends = ()
                return False

    def _parse_call(self, any_name: bool) -> Steps[bool]:
        """Parse one call; return False, and emit no event, if the text is not a call."""
        name = yield from self._parse_name(_NAME)
        if not name or not (any_name or name in self.tools) or not (yield from self.accept_token(self._tags.named)):
            return False
        if not (yield from self._is_ahead(self._tags.key, self._tags.call_end)):
            return False
        self.start_call(name)
        yield from self._parse_parameters(self.tools.get(name, {}))
        return True

    def _parse_parameters(self, schema: Schema) -> Steps[None]:
        """Parse the parameters of a call and the end of it. The arguments stay incomplete if the answer does."""
        tags = self._tags
        properties = schema.get("properties")
        missing = {*properties} if isinstance(properties, dict) else set()
        opening = "{"
        while True:
            yield from self.skip_space()
            if (yield from self.accept_token(tags.call_end)):
                break
            head = (yield from self._parse_parameter()) if (yield from self.accept_token(tags.key)) else None
            if head is None:
                if self._is_cut(tags.key, tags.call_end, *tags.value, *tags.marks):
                    return
                self._pos = self._kept
                break
            key, mark = head
            self.add_arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
            opening = ", "
            missing.discard(key)
            if not (yield from self._parse_text(_types(schema, key, mark), missing)):
                return
        self.add_arguments("{}" if opening == "{" else "}")

    def _parse_parameter(self) -> Steps[tuple[str, bool | None] | None]:
        """Parse the name of a parameter and the text up to its value. Return the name, and whether the call marks the
        value as a string, None if it does not say; return None if the text is malformed or ends."""
        key, is_string = (yield from self._parse_name(_KEY)), None
        for i, mark in enumerate(self._tags.marks):
            if (yield from self.accept_token(mark)):
                is_string = i == 0
        for text in self._tags.value:
            yield from self.skip_space()
            if not (yield from self.accept_token(text)):
                return None
        return (key, is_string) if key else None

    def _parse_text(self, types: Types, missing: Collection[str]) -> Steps[bool]:
        """Parse one value. If the text ends within the value, emit its text so far and return False."""
        tags, value = self._tags, ArgumentValue(types, own_lines=self._tags.own_lines)
        ends = [tags.value_end, tags.call_end, tags.key]
        if tags.wrapper and (yield from self.accept_token(tags.wrapper[0])):
            ends = [tags.wrapper[1] + tags.value_end]

        def push(text: str) -> None:
            self.add_arguments(value.push(text))

        while marker := (yield from self.send_until(push, *ends)):
            if (yield from self._ends_value(marker, missing)):
                self.add_arguments(value.finish())
                return True
            push(marker)
        self.add_arguments(value.break_off())
        return False

    def _ends_value(self, marker: str, missing: Collection[str]) -> Steps[bool]:
        """Return whether `marker` ends the value; if not, it is a part of it. Values may contain tags, and models omit
        ends of values: so a tag that may follow must follow `marker`. Only the end of a value is consumed."""
        tags = self._tags
        if marker == tags.key:
            head = yield from self._parse_parameter()
            is_end = head is not None and head[0] in missing
        else:
            following = [text for text in (tags.end, tags.call, tags.start, *tags.fillers) if text]
            following += [tags.key, tags.call_end] if marker != tags.call_end else []
            is_end = (yield from self._is_ahead(*following)) or self._is_cut(*following)
        is_consumed = not is_end or marker not in (tags.key, tags.call_end)
        self._pos = self._kept + (len(marker) if is_consumed else 0)
        return is_end

    def _parse_name(self, characters: re.Pattern[str]) -> Steps[str]:
        yield from self.skip_space()
        yield from self.consume_run(_QUOTES)
        name = yield from self.consume_run(characters)
        yield from self.consume_run(_QUOTES)
        yield from self.skip_space()
        return name.strip()

    def _is_ahead(self, *texts: str) -> Steps[bool]:
        """Return whether one of `texts` comes next, after white space, without consuming it."""
        start = self._pos - self._kept
        yield from self.skip_space()
        found = yield from self._accept_any(*texts)
        self._pos = self._kept + start
        return bool(found)

    def _accept_any(self, *texts: str) -> Steps[str]:
        """Consume and return one of `texts`, or return ""."""
        for text in texts:
            if (yield from self.accept_token(text)):
                return text
        return ""

    def _is_cut(self, *texts: str) -> bool:
        """Return whether the answer ends here or within one of `texts`."""
        rest = self._buffer[self._pos :].lstrip()
        return self._ended and any(text.startswith(rest) for text in texts)


def _types(schema: Schema, key: str, is_string: bool | None) -> Types:
    types = types_of(schema, key)
    if is_string and (not types or "string" in types):
        return STRING
    return types or (STRING if is_string is None else ANY)


def tagged_parser(*variants: Tags) -> type[TaggedParser]:
    """Make the parser type of one format."""

    class Parser(TaggedParser):
        rows = variants
        markers = tuple(dict.fromkeys(text for tags in variants for text in tags.markers))

    return Parser


def _functions(block: str = "tool_call", *, own_lines: bool = False) -> Tags:
    return Tags(
        start=f"<{block}>",
        end=f"</{block}>",
        call="<function=",
        key="<parameter=",
        value_end="</parameter>",
        call_end="</function>",
        own_lines=own_lines,
    )


def _invokes(
    start: str, end: str, prefix: str = "", *, fillers: tuple[str, ...] = (), tokens: tuple[str, ...] = ()
) -> Tags:
    return Tags(
        start=start,
        end=end,
        call=f"<{prefix}invoke name=",
        key=f"<{prefix}parameter name=",
        value_end=f"</{prefix}parameter>",
        call_end=f"</{prefix}invoke>",
        fillers=fillers,
        marks=('string="true"', 'string="false"'),
        tokens=tokens,
    )


def _pairs(suffix: str = "", *, start: str = "", end: str = "", named: str = "") -> Tags:
    return Tags(
        start=start,
        end=end,
        call=f"<tool_call{suffix}>",
        named=named,
        key=f"<arg_key{suffix}>",
        value=(f"</arg_key{suffix}>", f"<arg_value{suffix}>"),
        value_end=f"</arg_value{suffix}>",
        call_end=f"</tool_call{suffix}>",
    )


def _dsml(block: str) -> Tags:
    return _invokes(f"<｜DSML｜{block}>", f"</｜DSML｜{block}>", "｜DSML｜", tokens=("｜DSML｜",))


_STEP3_FILLERS = ("<｜tool_call_begin｜>", "function<｜tool_sep｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>")

#: Name of each format -> its variants.
TAGGED: dict[str, tuple[Tags, ...]] = {
    "qwen3_coder": (_functions(own_lines=True),),
    "qwen3_xml": (_functions(own_lines=True),),
    "mimo": (_functions(),),
    "step3p5": (_functions(own_lines=True),),
    "seed_oss": (_functions("seed:tool_call"),),
    "glm45": (_pairs(),),
    "glm47": (_pairs(),),
    "poolside_v1": (_pairs(),),
    "hy_v3": tuple(
        _pairs(suffix, start=f"<tool_calls{suffix}>", end=f"</tool_calls{suffix}>", named=f"<tool_sep{suffix}>")
        for suffix in (":opensource", "")
    ),
    "minimax_m2": (_invokes("<minimax:tool_call>", "</minimax:tool_call>"),),
    "deepseek_v32": (_dsml("function_calls"),),
    "deepseek_v4": (_dsml("tool_calls"),),
    "step3": (_invokes("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", "steptml:", fillers=_STEP3_FILLERS),),
    "minicpm5": (
        Tags(
            call="<function name=",
            key="<param name=",
            value_end="</param>",
            call_end="</function>",
            wrapper=("<![CDATA[", "]]>"),
            tokens=("<function", "<param"),
        ),
    ),
}
