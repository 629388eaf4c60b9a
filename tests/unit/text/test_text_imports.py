"""The packages `text` and `wire` run in API servers and routers, so they must not import heavy packages."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "triton", "transformers", "numpy", "msgspec", "zmq", "fastapi", "gguf", "safetensors")
MODULES = "import octavo_engine.text.template, octavo_engine.text.stop_strings, octavo_engine.text.detokenizer"


@pytest.mark.parametrize(
    ("imports", "banned"),
    [
        (MODULES, HEAVY),
        (
            "import octavo_engine.wire.hashing, octavo_engine.wire.metrics, octavo_engine.wire.plan",
            (*HEAVY, "tokenizers", "jinja2", "prometheus_client"),
        ),
    ],
    ids=["text", "wire"],
)
def test_importing_imports_no_heavy_package(imports: str, banned: tuple[str, ...]) -> None:
    script = f"import sys; {imports}; print([name for name in {banned} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
