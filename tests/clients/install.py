"""Install the clients from PyPI and npm, in the versions of `python/*.txt` and `node/package.json`."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PYTHON = {
    "openai": "openai",
    "anthropic": "anthropic",
    "litellm": "litellm",
    "langchain_openai": "langchain-openai",
    "langchain_anthropic": "langchain-anthropic",
    "llama_index": "llama-index-llms-openai-like",
    "instructor": "instructor",
    "cohere": "cohere",
    "openai_agents": "openai-agents",
    "pydantic_ai": "pydantic-ai-slim",
    "lm_eval": "lm_eval",
}
NODE = {
    "openai": "openai",
    "anthropic": "@anthropic-ai/sdk",
    "eventsource": "eventsource",
    "vercel_ai": "ai",
    "codex": "@openai/codex",
    "claude_code": "@anthropic-ai/claude-code",
}
LLAMA_INDEX = ("llama_index",)
#: Virtual environments: the checks that run there, and the arguments of each `pip install`. llama-index needs older
#: versions of the packages openai and cohere.
VENVS = {
    "venv": (PYTHON.keys() - LLAMA_INDEX, (("-r", "requirements.txt"), ("--no-deps", "-r", "no-deps.txt"))),
    "venv-llama-index": (LLAMA_INDEX, (("-r", "llama-index.txt"),)),
}
NAMES = (*(f"python/{name}" for name in PYTHON), *(f"node/{name}" for name in NODE))


def install_python(folder: Path) -> dict[str, str]:
    """Install the Python clients; return the version of each check's client that is installed."""
    versions = {}
    for venv, (names, installs) in VENVS.items():
        python = folder / venv / "bin" / "python"
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", folder / venv], check=True)
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        for flags in installs:
            if subprocess.run([*pip, "install", "--quiet", *flags], check=False, cwd=HERE / "python").returncode:
                print(f"pip could not install {' '.join(flags)}; its clients are left out", file=sys.stderr)
        listing = subprocess.run([*pip, "list", "--format", "json"], check=True, capture_output=True).stdout
        installed = {entry["name"]: entry["version"] for entry in json.loads(listing)}
        versions |= {f"python/{name}": installed[PYTHON[name]] for name in names if PYTHON[name] in installed}
    return versions


def install_node(folder: Path) -> dict[str, str]:
    """Install the Node clients, and copy the checks beside them, where Node finds the packages.

    Return the versions of the installed clients, by name. Without Node, return none, even if an earlier run has
    installed some: they cannot run.
    """
    if missing := [command for command in ("node", "npm") if shutil.which(command) is None]:
        print(f"{' and '.join(missing)} not found; the clients of Node are left out: install Node 20", file=sys.stderr)
        return {}
    shutil.copytree(HERE / "node", folder, dirs_exist_ok=True)
    if subprocess.run(["npm", "install", "--silent", "--prefix", folder], check=False).returncode:
        print("npm could not install package.json; its clients are left out", file=sys.stderr)
    manifests = {name: folder / "node_modules" / package / "package.json" for name, package in NODE.items()}
    return {
        f"node/{name}": json.loads(path.read_text())["version"] for name, path in manifests.items() if path.exists()
    }
