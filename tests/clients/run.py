"""Run clients that people use against Octavo, and print a list: ok, or the wrong answers of each.

Each check in `python/` and `node/` uses one client, and runs against servers and through routers (`servers.py`). Tool
loops run on a model that obeys its user (`obeying_server.py`); what a grammar enforces is checked on SmolLM2; errors
are compared with those of the client's vendor (`faults.py`). A check writes its results into a file, from which the
table docs/reference/clients.md is made (`table.py`): `--update` writes it, a run of all clients without it compares it.

The clients are installed into a folder of their own (`install.py`). A client that could not be installed is listed so.
The exit code is 1 after a wrong answer, if the table is another one, or if none of the clients could be installed.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from faults import faults
from install import NAMES, VENVS, install_node, install_python
from servers import WAYS, addresses
from table import DOCUMENT, Entry, render

HERE = Path(__file__).parent
CLIENT_LIMIT_S = 900
REMEDY = f"{DOCUMENT.name} differs from what the clients do; if that is intended: make test-clients ARGS=--update"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "clients", nargs="*", metavar="CLIENT", help=f"Clients to run: {', '.join(NAMES)}. Default: all."
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("build/clients"),
        help="Folder of the installed clients. Default: build/clients.",
    )
    parser.add_argument("--update", action="store_true", help="Write the table from this run, which is of all clients.")
    args = parser.parse_args()
    if unknown := sorted(set(args.clients) - set(NAMES)):
        parser.error(f"no such client: {', '.join(unknown)}; choose from {', '.join(NAMES)}")
    if args.update and args.clients:
        parser.error("--update writes the table of all clients: leave the names out")
    folder = args.folder.resolve()
    versions = install_python(folder) | install_node(folder / "node")
    names = args.clients or [*NAMES]
    absent = [name for name in names if name not in versions]
    if args.update and absent:
        print(f"{DOCUMENT.name} can't be written, as these clients are not installed: {', '.join(absent)}")
        return 1
    results, failed = asyncio.run(run_checks(names, versions, folder))
    if args.clients or absent:
        return int(failed or absent == names)
    rows = {entry.row: versions[name] for name, entries in results["server"].items() for entry in entries}
    document = render({way: [e for name in NAMES for e in results[way][name]] for way in WAYS}, rows)
    if args.update:
        DOCUMENT.write_text(document)
    elif document != DOCUMENT.read_text():
        print(REMEDY)
        return 1
    return int(failed)


async def run_checks(
    names: list[str], versions: dict[str, str], folder: Path
) -> tuple[dict[str, dict[str, list[Entry]]], bool]:
    """Return the results by way and client, and whether one is wrong."""
    results: dict[str, dict[str, list[Entry]]] = {way: {} for way in WAYS}
    has_failed = False
    with tempfile.TemporaryDirectory() as made:
        async with addresses(Path(made)) as of_way:
            for name in names:
                for way in WAYS if name in versions else ():
                    oracle = f"{sys.executable} {HERE / 'transformers_logprobs.py'}"
                    own = {"ORACLE": oracle, "FAULTS": faults(), "RESULTS": str(Path(made) / f"{name} {way}.jsonl")}
                    results[way][name], wrong = await run_check(name, folder, {**os.environ, **of_way[way], **own})
                    has_failed = has_failed or bool(wrong)
                    print(f"{name:28}{versions[name]:12}{way:8}{'; '.join(wrong) or 'ok'}", flush=True)
                if name not in versions:
                    print(f"{name:28}{'-':12}{'':8}not installed", flush=True)
    return results, has_failed


async def run_check(name: str, folder: Path, env: dict[str, str]) -> tuple[list[Entry], list[str]]:
    """Return the results of a check, and what is wrong."""
    language, client = name.split("/")
    if language == "python":
        venv = next(venv for venv, (names, _) in VENVS.items() if client in names)
        argv = [folder / venv / "bin" / "python", HERE / "python" / f"check_{client}.py"]
    else:
        argv = ["node", folder / "node" / f"check_{client}.mjs"]
    results = Path(env["RESULTS"])
    results.parent.mkdir(exist_ok=True)
    results.touch()
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
        output = f"no end within {CLIENT_LIMIT_S} s".encode()
    entries = [Entry(**json.loads(line)) for line in results.read_text().splitlines()]
    wrong = [f"{entry.row}, {entry.column}: {entry.fault}"[:300] for entry in entries if entry.fault is not None]
    if process.returncode or not entries:
        lines = output.decode(errors="replace").strip().splitlines() or ["no output"]
        wrong.append([*(line for line in lines if "Error" in line), lines[-1]][0].strip()[:300])
    return entries, wrong


if __name__ == "__main__":
    sys.exit(main())
