"""The public Python API: `from octavo_engine import LLM, SamplingParams`.

Names are imported on first use, so that importing a light part (`octavo_engine.wire`, `octavo_engine.text`)
never imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from octavo_engine.frontend.async_llm import AsyncLLM as AsyncLLM
    from octavo_engine.frontend.beam_search import BeamSearchParams as BeamSearchParams
    from octavo_engine.frontend.outputs import CompletionOutput as CompletionOutput
    from octavo_engine.frontend.outputs import EmbeddingOutput as EmbeddingOutput
    from octavo_engine.frontend.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from octavo_engine.frontend.outputs import RequestOutput as RequestOutput
    from octavo_engine.frontend.outputs import ScoringOutput as ScoringOutput
    from octavo_engine.frontend.outputs import ScoringRequestOutput as ScoringRequestOutput
    from octavo_engine.offline.llm import LLM as LLM
    from octavo_engine.offline.script_types import AsyncEngineArgs as AsyncEngineArgs
    from octavo_engine.offline.script_types import EngineArgs as EngineArgs
    from octavo_engine.offline.script_types import LoRARequest as LoRARequest
    from octavo_engine.offline.script_types import PromptType as PromptType
    from octavo_engine.offline.script_types import TextPrompt as TextPrompt
    from octavo_engine.offline.script_types import TokensPrompt as TokensPrompt
    from octavo_engine.wire.errors import InvalidRequest as InvalidRequest
    from octavo_engine.wire.pooling import PoolingParams as PoolingParams
    from octavo_engine.wire.sampling import RequestOutputKind as RequestOutputKind
    from octavo_engine.wire.sampling import SamplingParams as SamplingParams
    from octavo_engine.wire.structured import StructuredOutputs as StructuredOutputs
    from octavo_engine.wire.structured import StructuredOutputsParams as StructuredOutputsParams

_HOMES = {
    "AsyncEngineArgs": "octavo_engine.offline.script_types",
    "AsyncLLM": "octavo_engine.frontend.async_llm",
    "BeamSearchParams": "octavo_engine.frontend.beam_search",
    "CompletionOutput": "octavo_engine.frontend.outputs",
    "EmbeddingOutput": "octavo_engine.frontend.outputs",
    "EmbeddingRequestOutput": "octavo_engine.frontend.outputs",
    "EngineArgs": "octavo_engine.offline.script_types",
    "InvalidRequest": "octavo_engine.wire.errors",
    "LLM": "octavo_engine.offline.llm",
    "LoRARequest": "octavo_engine.offline.script_types",
    "PoolingParams": "octavo_engine.wire.pooling",
    "PromptType": "octavo_engine.offline.script_types",
    "RequestOutput": "octavo_engine.frontend.outputs",
    "RequestOutputKind": "octavo_engine.wire.sampling",
    "SamplingParams": "octavo_engine.wire.sampling",
    "ScoringOutput": "octavo_engine.frontend.outputs",
    "ScoringRequestOutput": "octavo_engine.frontend.outputs",
    "StructuredOutputs": "octavo_engine.wire.structured",
    "StructuredOutputsParams": "octavo_engine.wire.structured",
    "TextPrompt": "octavo_engine.offline.script_types",
    "TokensPrompt": "octavo_engine.offline.script_types",
}
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "InvalidRequest",
    "LoRARequest",
    "PoolingParams",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputs",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("octavo-engine")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
