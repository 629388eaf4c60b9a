"""A loader of the engine's own executor, on whose rank 0 the results of some requests fail."""

from typing import Any

from octavo_engine.process import parallel_executor
from octavo_engine.runner import pooling
from octavo_engine.runner.executor import Executor
from octavo_engine.sampling.logit_edits import TokenMasks
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import ReadyInfo

LOADER = f"{__name__}:load_executor"
#: The vector of a prompt of this length fails, and so does the sampling of a request with a bias of this token.
FAULTY_LENGTH, FAULTY_TOKEN = 13, 77


def load_executor(config: EngineConfig) -> tuple[Executor, ReadyInfo]:
    make_vector, apply_masks = pooling._vector, TokenMasks.apply

    def fail_by_length(seq: Any, row: Any) -> Any:
        if seq.num_prompt_tokens == FAULTY_LENGTH:
            raise ArithmeticError("a faulty vector")
        return make_vector(seq, row)

    def fail_by_token(masks: TokenMasks, row: Any, output: Any) -> None:
        if masks.bias_ids is not None and FAULTY_TOKEN in masks.bias_ids.tolist():
            raise ArithmeticError("a faulty mask")
        apply_masks(masks, row, output)

    pooling._vector = fail_by_length
    TokenMasks.apply = fail_by_token  # type: ignore[method-assign]
    return parallel_executor.load_executor(config)
