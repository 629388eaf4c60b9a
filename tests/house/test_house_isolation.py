"""Imports of the light packages in a fresh interpreter, because import contracts can't see every import."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "triton", "transformers", "kubernetes", "kopf")
SERVING = ("fastapi", "starlette", "uvicorn")

LIGHT_MODULES = {
    "octavo_engine": HEAVY + SERVING,
    "octavo_engine.wire": (*HEAVY, *SERVING, "numpy", "msgspec", "zmq", "tokenizers", "jinja2"),
    "octavo_engine.text": HEAVY + SERVING,
    "octavo_engine.media.placeholders": (*HEAVY, *SERVING, "numpy", "PIL"),
    "octavo_engine.media.processor_settings": (*HEAVY, *SERVING, "numpy", "PIL"),
    "octavo_engine.media.processed_images": (*HEAVY, *SERVING, "PIL"),
    "octavo_engine.sources": HEAVY + SERVING,
    "octavo_engine.core": (*HEAVY, *SERVING, "numpy", "zmq"),
    "octavo_engine.settings": HEAVY + SERVING,
    "octavo_engine.loop": HEAVY + SERVING,
    "octavo_engine.frontend": HEAVY + SERVING,
    "octavo_engine.offline": HEAVY + SERVING,
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
    """Import `module` with its submodules and return the `names` that are loaded then."""
    deep = module != "octavo_engine"
    script = IMPORT_ALL.replace("deep", str(deep))
    done = subprocess.run([sys.executable, "-c", script, module, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_a_light_package_imports_nothing_heavy(module: str) -> None:
    assert imported(module, LIGHT_MODULES[module]) == []


def test_the_check_finds_a_loaded_module() -> None:
    assert imported("octavo_engine.wire", ("enum", "dataclasses")) == ["enum", "dataclasses"]
