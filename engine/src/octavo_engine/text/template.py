"""`ChatTemplate`: renders a conversation as the text of a prompt, with the model's chat template.

The rendered text contains all special tokens, so encode it with `add_special_tokens=False`. Every error while rendering
is caused by the request or the template and becomes InvalidRequest. Rendering is bounded in time and size, as a
template is no more trustworthy than the weights that it came with.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.text.messages import normalise_messages
from octavo_engine.text.sandbox import RaisedByTemplate, RangeBudget, template_environment
from octavo_engine.text.template_meter import METER, Meter, meter_tree
from octavo_engine.text.tokenizer import Tokenizer, token_content
from octavo_engine.wire.errors import InvalidRequest, StartupError

NO_TEMPLATE = "This model has no chat template: start the server with --chat-template, or use /v1/completions."
MAX_CHARS = 16 << 20
MAX_RANGE_ITEMS = 1_000_000

_TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
#: Matches the test in a template whether a message's content is null.
_TESTS_CONTENT = re.compile(r"""\bcontent(["']\])? is (not )?none""", re.IGNORECASE)
#: Marks the end of the last message, with private-use characters that no message contains by accident.
_END_MARK = "\ue0f0octavo\ue0f1"


class EdgeTokens(Protocol):
    """The tokenizer's tokens at the beginning and the end of a text."""

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    def token_str(self, token_id: int) -> str: ...


class ChatTemplate:
    """A thread-safe template. `special_tokens`: variables that the template may use, e.g. `bos_token`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        environment = template_environment()
        try:
            self._template = environment.from_string(meter_tree(environment.parse(source)))
        except TemplateSyntaxError as error:
            message = f"The chat template is not valid Jinja: line {error.lineno}: {error.message}"
            raise InvalidRequest(message, param="chat_template") from error
        self.source = source
        self._tests_content = _TESTS_CONTENT.search(source) is not None
        self.special_tokens = dict(special_tokens or {})

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
        conversation = normalise_messages(messages, keeps_null=self._tests_content)
        if "developer" not in self.source:
            _rename_developer(conversation)
        if continue_final_message:
            if add_generation_prompt:
                message = "continue_final_message and add_generation_prompt cannot both be true."
                raise InvalidRequest(message, param="continue_final_message")
            if messages[-1].get("content") is None:
                where = f"messages[{len(messages) - 1}].content"
                raise InvalidRequest(f"{where} is null: continue_final_message needs a text to continue.", param=where)
            conversation[-1]["content"] += _END_MARK
        given = {
            **self.special_tokens,
            **kwargs,
            "messages": conversation,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = "".join(self._pieces(given))
        return _up_to_mark(text) if continue_final_message else text

    def _pieces(self, given: dict[str, Any]) -> Iterator[str]:
        num_chars, limits = 0, {"range": RangeBudget(MAX_RANGE_ITEMS), METER: Meter()}
        try:
            for piece in self._template.generate(given, **limits):
                num_chars += len(piece)
                if num_chars > MAX_CHARS:
                    raise SecurityError(f"the prompt has more than {MAX_CHARS} characters")
                yield piece
        except RaisedByTemplate as error:
            raise InvalidRequest(f"The chat template rejected these messages: {error}", param="messages") from error
        except (
            TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
            RecursionError,
        ) as error:
            message = f"The chat template cannot render these messages: {error or type(error).__name__}"
            raise InvalidRequest(message, param="messages") from error


def _rename_developer(conversation: list[dict[str, Any]]) -> None:
    """Rename OpenAI's newer role "developer" to "system": other templates would omit the message."""
    for message in conversation:
        if message["role"] == "developer":
            message["role"] = "system"


def _up_to_mark(text: str) -> str:
    end = text.rfind(_END_MARK)
    if end < 0:
        message = "The chat template omits the last message, so it cannot be continued."
        raise InvalidRequest(message, param="continue_final_message")
    return text[:end]


def load_chat_template(files: ModelFiles, tokenizer: Tokenizer, override: str | None = None) -> ChatTemplate | None:
    """Load `override` (the value of --chat-template: a file or a template's text), else the checkpoint's own template.

    Return None if there is none. Raises StartupError for a template that cannot be used.
    """
    source = files.chat_template if override is None else _read(override)
    if source is None:
        return None
    try:
        return ChatTemplate(source, special_tokens(files.tokenizer_config, tokenizer))
    except InvalidRequest as error:
        hint = f"{files.name}: {error} Pass a valid one by --chat-template." if override is None else str(error)
        raise StartupError(hint) from error


def special_tokens(tokenizer_config: Mapping[str, Any], tokenizer: EdgeTokens) -> dict[str, str]:
    """Return the text of special tokens by role, with the names that templates use."""
    ids = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
    by_role = {role: tokenizer.token_str(token_id) for role, token_id in ids.items() if token_id is not None}
    configured = {role: token_content(tokenizer_config.get(role)) for role in _TOKEN_ROLES}
    return by_role | {role: token for role, token in configured.items() if token is not None}


def _read(template: str) -> str:
    if "{" in template or "\n" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise StartupError(
            f"--chat-template: {template} is neither a readable file nor the text of a template: {error}."
        ) from error
