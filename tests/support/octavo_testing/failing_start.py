"""Engines on a device whose kernels compile late, whose starts fail: the real commands and the real loader.

`python -m octavo_testing.failing_start NAME serve ...` and `... NAME up ...` fail by the function NAME of this module,
which is the loader of the engine core's process. `octavo up` starts its children with a process id after NAME.
"""

import ast
import sys
from typing import Any, NoReturn

import torch
from octavo_engine.devices import device as device_module
from octavo_engine.devices.device import CpuDevice
from octavo_engine.frontend.async_llm import AsyncLLM
from octavo_engine.runner import load as loading
from octavo_engine.runner import model_loading
from octavo_engine.runner.runner import Runner
from octavo_engine.settings.config import EngineConfig
from octavo_server.cli import serve
from octavo_server.cli.main import main
from octavo_server.up import child
from octavo_server.up.child_main import end_with_parent
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

MODULE = "octavo_testing.failing_start"
NO_IMAGE = "CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors might be reported"


class LateCpu(CpuDevice):
    """A CPU whose kernels are said to compile late."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__(rank)
        self.compiles_late = True


def compilation_error() -> CompilationError:
    """Return the error of a kernel whose inner function fails to compile, as Triton chains them."""
    node = ast.parse("\n\nx = y").body[0]
    error = CompilationError("def kernel():\n    inner()\n    x = y", node, None)
    error.__cause__ = CompilationError("def inner():\n    pass\n    x = y", node, "Cannot make_shape_compatible")
    return error


def fail_in_first_step(error: Exception, config: EngineConfig) -> Any:
    def fail(*_arguments: object) -> NoReturn:
        raise error

    Runner._start = fail  # type: ignore[method-assign]
    return load(config)


def load(config: EngineConfig) -> Any:
    device_module.CpuDevice = LateCpu  # type: ignore[misc]
    return loading.load(config)


def assertion(config: EngineConfig) -> Any:
    return fail_in_first_step(AssertionError(), config)


def compile_error(config: EngineConfig) -> Any:
    return fail_in_first_step(compilation_error(), config)


def out_of_resources(config: EngineConfig) -> Any:
    return fail_in_first_step(OutOfResources(270336, 101376, "shared memory"), config)


def no_kernel_image(config: EngineConfig) -> Any:
    def fail(*_arguments: object, **_options: object) -> NoReturn:  # the first kernel runs while weights are loaded
        raise torch.AcceleratorError(NO_IMAGE)

    model_loading.load_model = fail
    return load(config)


#: Name of each loader -> text of its cause.
CAUSES = {
    "assertion": "AssertionError",
    "compile_error": "Cannot make_shape_compatible",
    "out_of_resources": "shared memory, Required: 270336, Hardware limit: 101376",
    "no_kernel_image": "no kernel image is available",
}


def run(name: str, arguments: list[str]) -> int:
    class FailingLLM(AsyncLLM):
        @classmethod
        async def start(cls, config: EngineConfig, **options: Any) -> AsyncLLM:
            return await AsyncLLM.start(config, **{**options, "loader": f"{MODULE}:{name}"})

    if arguments[0].isdecimal():
        end_with_parent(int(arguments.pop(0)))
    serve.AsyncLLM = FailingLLM  # type: ignore[misc]
    child.COMMAND = (sys.executable, "-P", "-m", MODULE, name)
    return main(arguments)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
