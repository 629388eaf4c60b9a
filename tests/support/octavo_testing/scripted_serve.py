"""`octavo serve` with the scripted engine in a core process: the real command, without compiling kernels.

If the environment names a valve (`VALVE`), the engine does only the steps that it allows.
"""

import sys
from typing import Any

from octavo_engine.frontend.async_llm import AsyncLLM
from octavo_engine.settings.config import EngineConfig
from octavo_server.cli import serve
from octavo_server.cli.main import main

from octavo_testing.scripted import LOADER

SCRIPTED_SERVE = (sys.executable, "-m", "octavo_testing.scripted_serve", "serve", "--host", "127.0.0.1")


class ScriptedLLM(AsyncLLM):
    @classmethod
    async def start(cls, config: EngineConfig, **options: Any) -> AsyncLLM:
        return await AsyncLLM.start(config, **{**options, "loader": LOADER})


if __name__ == "__main__":
    serve.AsyncLLM = ScriptedLLM  # type: ignore[misc]
    sys.exit(main())
