"""Commands that start the engines which `install_peers.sh` installed in a folder.

A peer that isn't installed is left out. Each gets the settings that its own documentation advises for a CPU.
"""

from pathlib import Path

from engine_process import ENGINES, EngineProcess
from machine import cores
from workload import Workload

DTYPE = "bfloat16"
MAX_MODEL_LEN = 4096
TCMALLOC = "libtcmalloc_minimal.so.4"


def octavo(python: str, model: str, dtype: str, workload: Workload, logs: Path) -> EngineProcess:
    command = [python, str(ENGINES / "octavo.py"), model, str(MAX_MODEL_LEN), str(workload.requests), dtype]
    return EngineProcess("octavo", command, env={}, log=logs / "octavo.log")


def find_peers(folder: Path, workload: Workload, logs: Path) -> list[EngineProcess]:
    builders = (_vllm, _transformers, _llama_cpp)
    return [peer for builder in builders if (peer := builder(folder, workload, logs)) is not None]


def _vllm(folder: Path, workload: Workload, logs: Path) -> EngineProcess | None:
    python, model = folder / "vllm/bin/python", folder / "models/smollm2"
    if not python.exists():
        return None
    libraries = [*Path("/usr/lib").glob(f"*/{TCMALLOC}"), folder / "vllm/lib/libiomp5.so"]
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "3",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores() - 1}",
        "LD_PRELOAD": ":".join(str(library.absolute()) for library in libraries if library.exists()),
    }
    command = [str(python), str(ENGINES / "vllm_cpu.py"), str(model), str(MAX_MODEL_LEN), str(workload.requests), DTYPE]
    return EngineProcess("vllm-cpu", command, env=env, log=logs / "vllm-cpu.log")


def _transformers(folder: Path, workload: Workload, logs: Path) -> EngineProcess | None:
    python, model = folder / "transformers/bin/python", folder / "models/smollm2"
    if not python.exists():
        return None
    command = [str(python), str(ENGINES / "transformers_static.py"), str(model), DTYPE, str(cores())]
    return EngineProcess("transformers", command, env={}, log=logs / "transformers.log")


def _llama_cpp(folder: Path, workload: Workload, logs: Path) -> EngineProcess | None:
    server, model = folder / "llama.cpp/bin/llama-server", folder / "models/smollm2-bf16.gguf"
    if not server.exists():
        return None
    slot_tokens = workload.input_tokens + workload.output_tokens + 128
    numbers = [str(workload.requests), str(slot_tokens), str(cores())]
    command = ["python3", str(ENGINES / "llama_cpp.py"), str(server), str(model), *numbers]
    return EngineProcess("llama.cpp", command, env={}, log=logs / "llama.cpp.log")
