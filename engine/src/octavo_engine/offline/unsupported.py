"""Methods of vLLM's `LLM` that this version lacks: each raises InvalidRequest, which names the reason and a remedy."""

from typing import Any, NoReturn

from octavo_engine.wire.errors import InvalidRequest

_POOLING = "models generate text, or make embeddings: use generate, chat, embed or score"
_RELEASE = "sleep gives the memory of the KV cache back"
_WORKERS = "no worker process takes calls of a script, and the model is private"
_PROFILE = "there is no profiler: run the script under a profiler such as py-spy"
_WEIGHTS = "weights are loaded from the model's files only: create another LLM"


class UnsupportedMethods:
    """The base of `LLM` that refuses by name, so that a script does not end with an AttributeError."""

    def encode(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("encode", _POOLING)

    def classify(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("classify", _POOLING)

    def reward(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("reward", _POOLING)

    def release_kv_cache_memory(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("release_kv_cache_memory", _RELEASE)

    def collective_rpc(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("collective_rpc", _WORKERS)

    def apply_model(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("apply_model", _WORKERS)

    def start_profile(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("start_profile", _PROFILE)

    def stop_profile(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("stop_profile", _PROFILE)

    def init_weight_transfer_engine(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("init_weight_transfer_engine", _WEIGHTS)

    def update_weights(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("update_weights", _WEIGHTS)


def _refuse(name: str, reason: str) -> NoReturn:
    raise InvalidRequest(f"LLM.{name} is not supported: {reason}.", param=name)
