"""Rejects requests that could never run: such a request at the head of the queue would block all later ones.

No sequence may have more than `max_len` tokens, the smaller of `max_model_len` and the size of the KV cache, so every
admitted sequence can run to its end once it is alone.
"""

from octavo_engine.config import SchedulerConfig
from octavo_engine.wire.errors import ContextLengthExceeded, InvalidRequest, StartupError
from octavo_engine.wire.records import EngineRequest


class Limits:
    def __init__(self, config: SchedulerConfig) -> None:
        for name in ("max_model_len", "num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(config, name) < 1:
                raise StartupError(f"{name} must be at least 1, got {getattr(config, name)}.")
        if not config.enable_chunked_prefill and config.max_num_batched_tokens < config.max_model_len:
            raise StartupError(
                f"Without chunked prefill a prompt is computed in one step, but max_num_batched_tokens="
                f"{config.max_num_batched_tokens} is below max_model_len={config.max_model_len}: raise the former, "
                f"lower the latter, or enable chunked prefill."
            )
        self._config = config
        self._capacity = config.num_blocks * config.block_size
        self.max_len = min(config.max_model_len, self._capacity)

    def check(self, request: EngineRequest) -> None:
        num_input, n = len(request.prompt_token_ids), request.params.n
        num_output = 0 if request.pooling is not None else 1
        if num_input < 1:
            raise InvalidRequest("The prompt is empty: give at least one token.", param="prompt")
        if num_input + num_output > self._config.max_model_len:
            raise ContextLengthExceeded(
                max_model_len=self._config.max_model_len,
                num_requested=request.params.max_tokens or num_output,
                num_input=num_input,
            )
        if num_input + num_output > self._capacity:
            reserved = ", one of them for output" if num_output else ""
            raise InvalidRequest(
                f"The prompt has {num_input} tokens; the KV cache holds {self._capacity}{reserved}: shorten the "
                "prompt or give the KV cache more memory.",
                param="input_tokens",
            )
        if n > self._config.max_num_seqs:
            raise InvalidRequest(
                f"n={n} outputs run side by side; the limit is max_num_seqs={self._config.max_num_seqs}: "
                f"lower n or raise max_num_seqs.",
                param="n",
            )
