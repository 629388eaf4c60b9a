"""Methods of vLLM's `LLM` that this version lacks: each raises InvalidRequest, which names the reason and a remedy."""

from collections.abc import Callable
from typing import Any, NoReturn

from octavo_engine.wire.errors import InvalidRequest

_POOLING = "models generate text, or make embeddings: use generate, chat, embed or score"
_WORKERS = "no worker process takes calls of a script, and the model is private"
_PROFILE = "there is no profiler: run the script under a profiler such as py-spy"
_WEIGHTS = "weights are loaded from the model's files only: create another LLM"


def _refusal(name: str, reason: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise InvalidRequest(f"LLM.{name} is not supported: {reason}.", param=name)

    return refuse


class UnsupportedMethods:
    """The base of `LLM` that refuses by name, so that a script does not end with an AttributeError."""

    encode = _refusal("encode", _POOLING)
    classify = _refusal("classify", _POOLING)
    reward = _refusal("reward", _POOLING)
    release_kv_cache_memory = _refusal("release_kv_cache_memory", "sleep gives the memory of the KV cache back")
    collective_rpc = _refusal("collective_rpc", _WORKERS)
    apply_model = _refusal("apply_model", _WORKERS)
    start_profile = _refusal("start_profile", _PROFILE)
    stop_profile = _refusal("stop_profile", _PROFILE)
    init_weight_transfer_engine = _refusal("init_weight_transfer_engine", _WEIGHTS)
    update_weights = _refusal("update_weights", _WEIGHTS)
