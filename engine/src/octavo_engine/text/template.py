"""`ChatTemplate`: a conversation to the text of a prompt, by the template that comes with the model.

The rendered text holds all special tokens, so it is to be encoded with `add_special_tokens=False`.
Whatever goes wrong while rendering is the request's fault or the template's, never a crash: it becomes InvalidRequest.
Rendering is bounded in time and size; a template can't be trusted more than the weights that it came with.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.text.messages import normalise_messages
from octavo_engine.text.sandbox import RaisedByTemplate, RangeBudget, template_environment
from octavo_engine.text.tokenizer import Tokenizer, token_content
from octavo_engine.wire.errors import InvalidRequest, StartupError

NO_TEMPLATE = "This model has no chat template: start the server with --chat-template, or use /v1/completions."
MAX_CHARS = 16 << 20
MAX_RENDER_S = 10.0
MAX_RANGE_ITEMS = 1_000_000

_TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
#: Where a template asks whether a message has content at all.
_TESTS_CONTENT = re.compile(r"""\bcontent(["']\])? is (not )?none""", re.IGNORECASE)
#: Marks where the last message ends; made of private characters that no message holds by chance.
_END_MARK = "\ue0f0octavo\ue0f1"


class ChatTemplate:
    """`special_tokens` are names that the template may use, e.g. `bos_token`. Safe to use from several threads."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, *, environment: Environment | None = None
    ) -> None:
        environment = environment or template_environment()
        try:
            self._template = environment.from_string(environment.parse(source))
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
        """`continue_final_message`: ends with the last message's own text, so that the model goes on with it."""
        conversation = normalise_messages(messages, keeps_null=self._tests_content)
        if "developer" not in self.source:
            _rename_developer(conversation)
        if continue_final_message:
            if add_generation_prompt:
                message = "continue_final_message and add_generation_prompt can't both be true."
                raise InvalidRequest(message, param="continue_final_message")
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
        deadline, num_chars = time.monotonic() + MAX_RENDER_S, 0
        try:
            for piece in self._template.generate(given, range=RangeBudget(MAX_RANGE_ITEMS)):
                num_chars += len(piece)
                if num_chars > MAX_CHARS:
                    raise SecurityError(f"the prompt has more than {MAX_CHARS} characters")
                if time.monotonic() > deadline:
                    raise SecurityError(f"it takes longer than {MAX_RENDER_S:.0f} s")
                yield piece
        except RaisedByTemplate as error:
            raise InvalidRequest(f"The chat template refuses these messages: {error}", param="messages") from error
        except (
            TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
            RecursionError,
        ) as error:
            message = f"The chat template can't render these messages: {error or type(error).__name__}"
            raise InvalidRequest(message, param="messages") from error


def _rename_developer(conversation: list[dict[str, Any]]) -> None:
    """OpenAI's newer name of the system role: a template that doesn't know it would leave the message out."""
    for message in conversation:
        if message["role"] == "developer":
            message["role"] = "system"


def _up_to_mark(text: str) -> str:
    end = text.rfind(_END_MARK)
    if end < 0:
        message = "The chat template leaves the last message out, so it can't be continued."
        raise InvalidRequest(message, param="continue_final_message")
    return text[:end]


def load_chat_template(files: ModelFiles, tokenizer: Tokenizer, override: str | None = None) -> ChatTemplate | None:
    """`override`: what --chat-template gave, a file or the template itself; else the checkpoint's own, if it has one.

    Raises StartupError where there is a template that can't be used.
    """
    source = files.chat_template if override is None else _read(override)
    if source is None:
        return None
    try:
        return ChatTemplate(source, special_tokens(files.tokenizer_config, tokenizer))
    except InvalidRequest as error:
        hint = f"{files.name}: {error} Pass --chat-template with one that is." if override is None else str(error)
        raise StartupError(hint) from error


def special_tokens(tokenizer_config: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, str]:
    """Their text by role, as templates name them."""
    ids = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
    found = {role: tokenizer.token_str(token_id) for role, token_id in ids.items() if token_id is not None}
    configured = {role: token_content(tokenizer_config.get(role)) for role in _TOKEN_ROLES}
    return found | {role: token for role, token in configured.items() if token is not None}


def _read(template: str) -> str:
    if "{" in template or "\n" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise StartupError(
            f"--chat-template: {template} is neither a readable file nor a template: {error}."
        ) from error
