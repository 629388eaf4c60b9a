"""vLLM's environment variables: those that have a meaning here, and those that are set without effect."""

import re
from collections.abc import Iterable, Mapping

LOGGING_LEVEL = "VLLM_LOGGING_LEVEL"
#: Variables that the engine reads.
ENGINE_VARIABLES = frozenset(
    {"VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_USE_MODELSCOPE", LOGGING_LEVEL}
)
#: Kubernetes' variables for a Service whose name begins with "vllm".
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP)")
_ADDRESS = ("tcp://", "udp://")


def unused_variables(environ: Mapping[str, str], honoured: Iterable[str] = ENGINE_VARIABLES) -> list[str]:
    """Log lines about variables of vLLM without effect: one line, or none."""
    names = sorted(name for name in environ if name.startswith("VLLM_") and not _is_service_link(name, environ[name]))
    unused = [name for name in names if name not in set(honoured)]
    return [f"set without effect here: {', '.join(unused)}"] if unused else []


def _is_service_link(name: str, value: str) -> bool:
    return bool(_SERVICE_LINK.search(name)) or value.startswith(_ADDRESS)
