"""The tool parsers by the names that `--tool-call-parser` takes."""

from collections.abc import Callable
from dataclasses import dataclass
from uuid import uuid4

from octavo_server.tools.call_reader import CallReader
from octavo_server.tools.hermes import HermesReader
from octavo_server.tools.llama3_json import Llama3JsonReader
from octavo_server.tools.mistral import MistralReader, new_mistral_id
from octavo_server.tools.pythonic import PythonicReader


def new_call_id() -> str:
    return f"chatcmpl-tool-{uuid4().hex}"


@dataclass(frozen=True, slots=True)
class ToolParser:
    """How a model writes calls: the reader of one answer, and what ids its template takes."""

    reader: type[CallReader]
    new_id: Callable[[], str] = new_call_id


TOOL_PARSERS = {
    "hermes": ToolParser(HermesReader),
    "llama3_json": ToolParser(Llama3JsonReader),
    "mistral": ToolParser(MistralReader, new_mistral_id),
    "pythonic": ToolParser(PythonicReader),
}
