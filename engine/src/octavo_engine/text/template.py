"""`ChatTemplate`: renders a conversation as the text of a prompt, with the model's chat template.

The rendered text contains all special tokens, so encode it with `add_special_tokens=False`. Every error while rendering
is caused by the request or the template and becomes InvalidRequest. Rendering is bounded in time and size, as a
template is no more trustworthy than the weights that it came with.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError

from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.text.messages import (
    IMAGE,
    PARTS,
    SYSTEM_ROLES,
    TEXT,
    ContentFormat,
    MessageRules,
    Part,
    append_text,
    normalise_messages,
)
from octavo_engine.text.sandbox import RaisedByTemplate, RangeBudget, meter_tree, template_environment
from octavo_engine.text.template_meter import METER, Meter
from octavo_engine.text.tokenizer import Tokenizer, token_content
from octavo_engine.wire.errors import InvalidRequest, StartupError

NO_TEMPLATE = "This model has no chat template: start the server with --chat-template, or use /v1/completions."
MAX_SOURCE_BYTES = 256 << 10
MAX_CHARS = 16 << 20
MAX_RANGE_ITEMS = 1_000_000

_TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
#: Marks the end of the last message, with private-use characters that no message contains by accident.
_END_MARK = "\ue0f0octavo\ue0f1"
_FIRST, _SECOND = "\ue0f0first\ue0f1", "\ue0f0second\ue0f1"
_USER = {"role": "user", "content": "Hi"}
_ASSISTANT = {"role": "assistant", "content": None}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": "{}"}}
_CALLS = {**_ASSISTANT, "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "1"}
_FUNCTION = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
#: Key of `MessageRules.formats` -> a conversation that shows how a template renders one message of it, and its place.
_SAMPLES: dict[str, tuple[list[dict[str, Any]], int]] = {
    "user": ([_USER], 0),
    "system": ([{"role": "system"}, _USER], 0),
    "developer": ([{"role": "developer"}, _USER], 0),
    "assistant": ([_USER, _ASSISTANT, _USER], 1),
    "call": ([_USER, _CALLS, _RESULT], 1),
    "tool": ([_USER, {**_CALLS, "content": "Hm"}, _RESULT], 2),  # some read the first part of any content
}
_SAMPLES_SHARE = 10  # of the limits of a rendering; known templates take up to a 150th
_FORMATS = {"string": TEXT, "openai": PARTS._replace(shows_images=True)}


class ChatTemplate:
    """A thread-safe template. `special_tokens`: variables that the template may use, e.g. `bos_token`.

    `content_format`: "string" or "openai" (lists of parts) for the content of all messages; "auto": for each role, a
    format in which the template renders the text. `tool_source`: the template of conversations with tools.
    `image_token`: see `MessageRules`; messages then hold IMAGE for each image (`take_images`).
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        tool_source: str | None = None,
        content_format: str = "auto",
        image_token: str | None = None,
    ) -> None:
        if content_format not in ("auto", *_FORMATS):
            message = f"chat_template_content_format is {content_format!r}: use one of auto, {', '.join(_FORMATS)}."
            raise InvalidRequest(message, param="chat_template_content_format")
        if (num_bytes := len(source.encode("utf-8", "surrogatepass"))) > MAX_SOURCE_BYTES:
            message = f"The chat template has {num_bytes} bytes; the limit is {MAX_SOURCE_BYTES}: shorten it."
            raise InvalidRequest(message, param="chat_template")
        environment = template_environment()
        try:
            tree = environment.parse(source)
            self._tests_null = _tests_null_content(tree)
            self._names_developer = any(constant.value == "developer" for constant in tree.find_all(nodes.Const))
            self._template = environment.from_string(meter_tree(tree))
        except TemplateSyntaxError as error:
            message = f"The chat template is not valid Jinja: line {error.lineno}: {error.message}"
            raise InvalidRequest(message, param="chat_template") from error
        except Exception as error:  # of Jinja's parser, or of Python's
            reason = f"{error or type(error).__name__}: correct it, or nest its parts less deeply."
            message = f"The chat template cannot be compiled: {reason}"
            raise InvalidRequest(message, param="chat_template") from error
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self.content_format = content_format
        self.tool_source = tool_source
        self._image_token = image_token
        self._for_tools: ChatTemplate | None = None
        if tool_source is not None:
            self._for_tools = ChatTemplate(
                tool_source, special_tokens, content_format=content_format, image_token=image_token
            )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Render messages as the text of a prompt. Raises InvalidRequest if the template rejects or cannot render them.

        `continue_final_message`: the prompt ends with the last message's text, so that the model continues it.
        """
        if tools and self._for_tools is not None:
            options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
            return self._for_tools.render(messages, tools=tools, **options, **kwargs)
        conversation = normalise_messages(messages, self._rules)
        if continue_final_message:
            if add_generation_prompt:
                message = "continue_final_message and add_generation_prompt cannot both be true."
                raise InvalidRequest(message, param="continue_final_message")
            if messages[-1].get("content") is None:
                where = f"messages[{len(messages) - 1}].content"
                raise InvalidRequest(f"{where} is null: continue_final_message needs a text to continue.", param=where)
            append_text(conversation[-1], _END_MARK)
        given = {**self.special_tokens, **kwargs, "messages": conversation, "tools": list(tools) if tools else None}
        text = "".join(self._pieces({**given, "add_generation_prompt": add_generation_prompt}, _limits()))
        return _up_to_mark(text) if continue_final_message else text

    @cached_property
    def _rules(self) -> MessageRules:
        """Rules that follow from renderings of short conversations, which share a part of the limits of one."""
        limits, rules = _limits(share=_SAMPLES_SHARE), MessageRules(image_token=self._image_token)
        if self.content_format != "auto":
            rules = replace(rules, formats={"user": _FORMATS[self.content_format]})
        for kind in _SAMPLES if self.content_format == "auto" else ():
            rules = replace(rules, formats={**rules.formats, kind: self._format_of(kind, rules, limits)})

        def shows(*roles: str) -> bool:
            marked = [{"role": role, "content": mark} for role, mark in zip(roles, (_FIRST, _SECOND), strict=False)]
            text = self._sample([*marked, _USER], rules, limits)
            return all(message["content"] in text for message in marked)

        knows_developer = self._names_developer and shows("developer")
        roles = SYSTEM_ROLES if knows_developer else ("system",)
        pairs = [(first, second) for first in roles for second in roles]
        return replace(
            rules,
            keeps_null=self._tests_null and self._renders_null(rules, limits),
            knows_developer=knows_developer,
            joined_systems=frozenset(pair for pair in pairs if not shows(*pair)),
        )

    def _renders_null(self, rules: MessageRules, limits: Mapping[str, Any]) -> bool:
        """False for a template that rejects null content of a message with calls, or prints it as "None"."""
        conversation, _ = _SAMPLES["call"]
        empty, null = (
            self._sample(conversation, replace(rules, keeps_null=keeps_null), limits) for keeps_null in (False, True)
        )
        return bool(null or not empty) and null.count("None") == empty.count("None")

    def _format_of(self, kind: str, rules: MessageRules, limits: Mapping[str, Any]) -> ContentFormat:
        """Return the format of content: a list of parts if the template drops plain text; several parts only if it
        renders them as it renders text.

        Images are parts if the template renders the token for one, beside a text.
        """
        conversation, place = _SAMPLES[kind]

        def rendered(parts: list[Part], wanted: ContentFormat, tools: list[dict[str, Any]] | None) -> str:
            message = {**conversation[place], "content": parts}
            messages = [*conversation[:place], message, *conversation[place + 1 :]]
            return self._sample(messages, replace(rules, formats={**rules.formats, kind: wanted}), limits, tools)

        samples = [
            (
                rendered([_FIRST], TEXT, tools),
                rendered([_FIRST], PARTS, tools),
                rendered([_FIRST, _SECOND], PARTS, tools),
            )
            for tools in (None, _TOOLS)
        ]
        shown = [(_FIRST in text, _FIRST in part) for text, part, _ in samples]
        wraps = (False, True) in shown and (True, False) not in shown
        takes_several = [
            _FIRST in parts and _SECOND in parts and (wraps or part == text)
            for text, part, parts in samples
            if text or part
        ]
        wanted = ContentFormat(wraps, joins=not takes_several or not all(takes_several))
        if (token := self._image_token) is None:
            return wanted
        with_image = [rendered([IMAGE, _FIRST], _FORMATS["openai"], tools) for tools in (None, _TOOLS)]
        shows_images = [text.count(token) == 1 and _FIRST in text for text in with_image if text]
        return wanted._replace(shows_images=bool(shows_images) and all(shows_images))

    def _sample(
        self,
        messages: Sequence[Mapping[str, Any]],
        rules: MessageRules,
        limits: Mapping[str, Any],
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """Render a conversation, or return an empty text if the template rejects it."""
        given = {"messages": normalise_messages(messages, rules), "tools": tools, "add_generation_prompt": True}
        try:
            return "".join(self._pieces({**self.special_tokens, **given}, limits))
        except InvalidRequest:
            return ""

    def _pieces(self, given: dict[str, Any], limits: Mapping[str, Any]) -> Iterator[str]:
        num_chars = 0
        try:
            for piece in self._template.generate(given, **limits):
                num_chars += len(piece)
                if num_chars > MAX_CHARS:
                    raise SecurityError(f"the prompt has more than {MAX_CHARS} characters")
                yield piece
        except RaisedByTemplate as error:
            raise InvalidRequest(
                f"The chat template rejected these messages: {error!s:.1000}", param="messages"
            ) from error
        except Exception as error:
            message = f"The chat template cannot render these messages: {str(error) or type(error).__name__:.1000}"
            raise InvalidRequest(message, param="messages") from error


def _limits(share: int = 1) -> dict[str, Any]:
    meter = Meter()
    meter.steps_left //= share
    meter.bytes_left //= share
    return {"range": RangeBudget(MAX_RANGE_ITEMS), METER: meter}


def _tests_null_content(tree: nodes.Template) -> bool:
    """True if the template tests whether the content of a message is null: `content is none` or `content == none`."""
    tested = [test.node for test in tree.find_all(nodes.Test) if test.name == "none"]
    tested += [c.expr for c in tree.find_all(nodes.Compare) if any(op.expr == nodes.Const(None) for op in c.ops)]
    return any(
        (isinstance(node, nodes.Name) and node.name == "content")
        or (isinstance(node, nodes.Getattr) and node.attr == "content")
        or (isinstance(node, nodes.Getitem) and node.arg == nodes.Const("content"))
        for node in tested
    )


def _up_to_mark(text: str) -> str:
    end = text.rfind(_END_MARK)
    if end < 0:
        message = "The chat template omits the last message, so it cannot be continued."
        raise InvalidRequest(message, param="continue_final_message")
    return text[:end]


def load_chat_template(
    files: ModelFiles,
    tokenizer: Tokenizer,
    override: str | None = None,
    content_format: str = "auto",
    image_token: str | None = None,
) -> ChatTemplate | None:
    """Load `override` (the value of --chat-template: a name, a file or a template's text), else the model's templates.

    Return None if there is none. Raises StartupError for a template that cannot be used.
    """
    named, tool_source = dict(files.named_chat_templates), None
    if files.chat_template is not None:
        named["default"] = files.chat_template
    if override is not None:
        source = named[override] if override in named else _read(override, named)
    elif named:
        missing = f"this model has no default template: choose one by --chat-template: {', '.join(sorted(named))}"
        source = named.get("default", f"{{{{ raise_exception({missing!r}) }}}}")
        tool_source = named.get("tool_use")
    else:
        return None
    try:
        tokens = special_tokens(files.tokenizer_config, tokenizer)
        return ChatTemplate(
            source, tokens, tool_source=tool_source, content_format=content_format, image_token=image_token
        )
    except InvalidRequest as error:
        hint = f"{files.name}: {error} Pass a valid one by --chat-template." if override is None else str(error)
        raise StartupError(hint) from error


def special_tokens(tokenizer_config: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, str]:
    """Return the text of special tokens by role, with the names that templates use."""
    ids = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
    by_role = {role: tokenizer.token_str(token_id) for role, token_id in ids.items() if token_id is not None}
    configured = {role: token_content(tokenizer_config.get(role)) for role in _TOKEN_ROLES}
    return by_role | {role: token for role, token in configured.items() if token is not None}


def _read(template: str, names: Collection[str]) -> str:
    if "{" in template or "\n" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise StartupError(
            f"--chat-template: {template} is neither a readable file nor the text of a template: {error}. "
            f"Names of the model's templates: {', '.join(sorted(names)) or 'none'}."
        ) from error
