"""An API server whose model obeys the user: a message may hold the answers that the model shall give.

A script, `<<1>>first answer<<2>>second answer<<end>>`, names the model's answers after the message that holds it, turn
by turn, so that a client's whole tool loop runs as written. `%LAST%` in an answer stands for the text of the prompt's
last message, for instance a tool's result. Server, prompts and parsers are Octavo's own; only the tokens are played.
"""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from octavo_engine.wire.records import EngineRequest
from octavo_server.output_parsing.tool_use import ToolSettings
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import ScriptedClient, serving

MODEL = "obeying"
MAX_MODEL_LEN = 1_000_000  # bytes: the prompts of coding agents have some 100 000
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls %}"
    "<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SCRIPT = re.compile(r"<<1>>(?:(?!<<1>>).)*?<<end>>", re.DOTALL)
_TURN = "<|im_start|>assistant\n"


class ObeyingClient(ScriptedClient):
    def reset(self) -> None:
        super().reset()
        self._answers: dict[str, str] = {}  # by request

    def reply_to(self, request: EngineRequest, index: int) -> str:
        if request.request_id not in self._answers:
            self._answers[request.request_id] = self._answer(request)
        return self._answers[request.request_id]

    def _answer(self, request: EngineRequest) -> str:
        """Return the answer that the prompt's script gives for this turn, or "ok" without a script."""
        prompt = self.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        found = list(_SCRIPT.finditer(prompt))
        if not found:
            return "ok"
        answers = re.split(r"<<(?:\d+|end)>>", found[-1][0])[1:-1]
        turn = prompt[found[-1].end() :].count(_TURN)
        last = prompt.removesuffix(_TURN).rpartition("<|im_start|>")[2].partition("\n")[2].partition("<|im_end|>")[0]
        return answers[min(turn, len(answers)) - 1].replace("%LAST%", last.strip())


@asynccontextmanager
async def obeying_server(folder: Path) -> AsyncIterator[str]:
    """Run the server; yield its address."""
    engine = ObeyingClient(write_byte_model(folder), chat_template=TEMPLATE, max_model_len=MAX_MODEL_LEN)
    tools = ToolSettings(tool_call_parser="hermes", enable_auto_tool_choice=True)
    async with serving(engine, tools=tools, served_model_names=(MODEL,)) as served:
        yield served.url
