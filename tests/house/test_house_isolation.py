"""What the light parts import, seen from a fresh interpreter: import contracts cannot see every way in."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "triton", "transformers", "kubernetes", "kopf")
SERVING = ("fastapi", "starlette", "uvicorn")

LIGHT_MODULES = {
    "octavo_engine": HEAVY + SERVING,
    "octavo_engine.wire": (*HEAVY, *SERVING, "numpy", "msgspec", "zmq", "tokenizers", "jinja2"),
    "octavo_engine.text": HEAVY + SERVING,
    "octavo_engine.sources": HEAVY + SERVING,
    "octavo_engine.core": (*HEAVY, *SERVING, "numpy", "zmq"),
    "octavo_engine.config": HEAVY + SERVING,
    "octavo_engine.async_llm": HEAVY + SERVING,
    "octavo_engine.llm": HEAVY + SERVING,
    "octavo_server.api": HEAVY,
    "octavo_server.openai": HEAVY,
    "octavo_server.router": HEAVY,
    "octavo_server.bench": HEAVY,
    "octavo_server.cli": HEAVY,
    "octavo_server.client": HEAVY + SERVING,
    "octavo_operator": ("torch", "triton", "transformers", *SERVING, "octavo_engine", "octavo_server"),
}

IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(getattr(package, "__path__", []) if deep else [], sys.argv[1] + "."):
    importlib.import_module(module.name)
print(*(name for name in sys.argv[2:] if name in sys.modules))
"""


def imported(module: str, names: tuple[str, ...]) -> list[str]:
    """Those of `names` that are loaded once `module`, and all that is in it, has been imported."""
    deep = module != "octavo_engine"
    script = IMPORT_ALL.replace("deep", str(deep))
    done = subprocess.run([sys.executable, "-c", script, module, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_light_part_imports_nothing_heavy(module: str) -> None:
    assert imported(module, LIGHT_MODULES[module]) == []


def test_the_check_sees_a_heavy_import() -> None:
    assert imported("octavo_engine.wire", ("enum", "dataclasses")) == ["enum", "dataclasses"]
