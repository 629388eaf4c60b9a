"""The public Python API: `from octavo_engine import LLM, SamplingParams`.

Names are imported on first use, so that importing a light part (`octavo_engine.wire`, `octavo_engine.text`)
never imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from octavo_engine.async_llm import AsyncLLM as AsyncLLM
    from octavo_engine.llm import LLM as LLM
    from octavo_engine.outputs import CompletionOutput as CompletionOutput
    from octavo_engine.outputs import RequestOutput as RequestOutput
    from octavo_engine.wire.sampling import SamplingParams as SamplingParams
    from octavo_engine.wire.structured import StructuredOutputs as StructuredOutputs
    from octavo_engine.wire.structured import StructuredOutputsParams as StructuredOutputsParams

_HOMES = {
    "AsyncLLM": "octavo_engine.async_llm",
    "CompletionOutput": "octavo_engine.outputs",
    "LLM": "octavo_engine.llm",
    "RequestOutput": "octavo_engine.outputs",
    "SamplingParams": "octavo_engine.wire.sampling",
    "StructuredOutputs": "octavo_engine.wire.structured",
    "StructuredOutputsParams": "octavo_engine.wire.structured",
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("octavo-engine")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
