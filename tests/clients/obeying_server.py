"""An API server whose model obeys the user: a message may hold the answers that the model shall give.

A script, `<<1>>first answer<<2>>second answer<<end>>`, names the model's answers after the message that holds it, turn
by turn, so that a client's whole tool loop runs as written. `%LAST%` in an answer stands for the text of the prompt's
last message, for instance a tool's result. `<<fail at N>>` makes the step of the N-th token fail, `<<refuse>>` is
answered as by an engine that takes no requests, and `<<wait>>` never. Server, prompts and parsers are Octavo's own;
only the tokens are played.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from octavo_engine.frontend.outputs import RequestOutput
from octavo_engine.frontend.request_builder import ResolvedParams, TokenizedPrompt
from octavo_engine.wire.errors import Unavailable
from octavo_engine.wire.records import EngineRequest, SeqOutput
from octavo_engine.wire.sampling import SamplingParams
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
FAIL, REFUSE, WAIT = "<<fail at ", "<<refuse>>", "<<wait>>"
_FAILURE = re.compile(rf"{FAIL}(\d+)>>")


class ObeyingClient(ScriptedClient):
    def reset(self) -> None:
        super().reset()
        self._answers: dict[str, str] = {}  # by request
        self._fail_at: dict[str, int] = {}  # by request

    async def generate(
        self, prompt: TokenizedPrompt, params: SamplingParams | ResolvedParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        text = self.tokenizer.decode(prompt.token_ids)
        if REFUSE in text:
            raise Unavailable("The prompt asks for a refusal: send another one.", retry_after_s=1)
        if WAIT in text:
            await asyncio.Event().wait()
        if failing := _FAILURE.search(text):
            self._fail_at[request_id] = int(failing[1])
        async for output in super().generate(prompt, params, request_id, **options):
            yield output

    def reply_to(self, request: EngineRequest, index: int) -> str:
        if request.request_id not in self._answers:
            self._answers[request.request_id] = self._answer(request)
        return self._answers[request.request_id]

    def _step(self, request: EngineRequest, index: int, position: int) -> SeqOutput:
        self.fail_at = self._fail_at.get(request.request_id)
        return super()._step(request, index, position)

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
async def obeying_server(folder: Path, *, max_model_len: int = MAX_MODEL_LEN, **config: Any) -> AsyncIterator[str]:
    """Run the server; yield its address."""
    engine = ObeyingClient(write_byte_model(folder), chat_template=TEMPLATE, max_model_len=max_model_len)
    tools = ToolSettings(tool_call_parser="hermes", enable_auto_tool_choice=True)
    async with serving(engine, tools=tools, served_model_names=(MODEL,), **config) as served:
        yield served.url
