"""Tool call formats by the names that `--tool-call-parser` accepts."""

from collections.abc import Callable
from dataclasses import dataclass
from uuid import uuid4

from octavo_server.output_parsing.hermes import HermesParser
from octavo_server.output_parsing.llama3_json import Llama3JsonParser
from octavo_server.output_parsing.mistral import MistralParser, new_mistral_id
from octavo_server.output_parsing.pythonic import PythonicParser
from octavo_server.output_parsing.tool_call_parser import ToolCallParser


def new_call_id() -> str:
    return f"chatcmpl-tool-{uuid4().hex}"


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """Format in which a model writes calls. `parser_type`: parser of one answer. `new_id`: makes an id for a call, of a
    kind that the model's template accepts."""

    parser_type: type[ToolCallParser]
    new_id: Callable[[], str] = new_call_id


TOOL_PARSERS = {
    "hermes": ToolCallFormat(HermesParser),
    "llama3_json": ToolCallFormat(Llama3JsonParser),
    "mistral": ToolCallFormat(MistralParser, new_mistral_id),
    "pythonic": ToolCallFormat(PythonicParser),
}
