"""Run clients that people use against Octavo, and print a list: ok, or the wrong answers of each.

Each check in `python/` and `node/` uses one client, and runs against servers and through routers (`servers.py`). Tool
loops run on a model that obeys its user (`obeying_server.py`); what a grammar enforces is checked on SmolLM2; errors
are compared with those of the client's vendor (`faults.py`). The results of each check are kept in a file. When there
are those of all clients, of one run or of several, the table docs/reference/clients.md is made of them (`table.py`):
`--update` writes it, a run without it compares it.

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
        help="Folder of the installed clients and their results. Default: build/clients.",
    )
    parser.add_argument("--update", action="store_true", help="Write the table from the results of all clients.")
    args = parser.parse_args()
    if unknown := sorted(set(args.clients) - set(NAMES)):
        parser.error(f"no such client: {', '.join(unknown)}; choose from {', '.join(NAMES)}")
    folder = args.folder.resolve()
    versions = install_python(folder) | install_node(folder / "node")
    names = args.clients or [*NAMES]
    failed = asyncio.run(run_checks(names, versions, folder)) or not versions.keys() & names
    files = {(name, way): results_of(folder, name, versions.get(name), way) for way in WAYS for name in NAMES}
    if absent := [f"{name} ({way})" for (name, way), path in files.items() if not path.exists()]:
        print(f"{DOCUMENT.name} is not {'written' if args.update else 'compared'}; no results of {', '.join(absent)}")
        return int(failed or args.update)
    entries = {way: [entry for name in NAMES for entry in read_entries(files[name, way])] for way in WAYS}
    rows = {entry.row: versions[name] for name in NAMES for entry in read_entries(files[name, WAYS[0]])}
    document = render(entries, rows)
    if args.update:
        DOCUMENT.write_text(document)
    elif document != DOCUMENT.read_text():
        print(REMEDY)
        return 1
    return int(failed)


def results_of(folder: Path, name: str, version: str | None, way: str) -> Path:
    """Return the path of a client's results. It exists after a check that ran to its end."""
    return folder / "results" / f"{name.replace('/', '-')} {version} {way}.jsonl"


def read_entries(path: Path) -> list[Entry]:
    return [Entry(**json.loads(line)) for line in path.read_text().splitlines()]


async def run_checks(names: list[str], versions: dict[str, str], folder: Path) -> bool:
    """Run the checks of the clients that are installed; return whether an answer was wrong."""
    has_failed = False
    (folder / "results").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        async with addresses(Path(made)) as of_way:
            for name in names:
                for way in WAYS if name in versions else ():
                    oracle = f"{sys.executable} {HERE / 'transformers_logprobs.py'}"
                    own = {"ORACLE": oracle, "FAULTS": faults()}
                    results = results_of(folder, name, versions[name], way)
                    wrong = await run_check(name, folder, results, {**os.environ, **of_way[way], **own})
                    has_failed = has_failed or bool(wrong)
                    print(f"{name:28}{versions[name]:12}{way:8}{'; '.join(wrong) or 'ok'}", flush=True)
                if name not in versions:
                    print(f"{name:28}{'-':12}{'':8}not installed", flush=True)
    return has_failed


async def run_check(name: str, folder: Path, results: Path, env: dict[str, str]) -> list[str]:
    """Run a check, write its results and return what is wrong."""
    language, client = name.split("/")
    if language == "python":
        venv = next(venv for venv, (names, _) in VENVS.items() if client in names)
        argv = [folder / venv / "bin" / "python", HERE / "python" / f"check_{client}.py"]
    else:
        argv = ["node", folder / "node" / f"check_{client}.mjs"]
    results.unlink(missing_ok=True)
    unfinished = results.with_suffix(".unfinished")
    unfinished.write_text("")
    process = await asyncio.create_subprocess_exec(
        *argv,
        env={**env, "RESULTS": str(unfinished)},
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
    entries = read_entries(unfinished)
    wrong = [f"{entry.row}, {entry.column}: {entry.fault}"[:300] for entry in entries if entry.fault is not None]
    if process.returncode or not entries:
        lines = output.decode(errors="replace").strip().splitlines() or ["no output"]
        wrong.append([*(line for line in lines if "Error" in line), lines[-1]][0].strip()[:300])
    else:
        unfinished.rename(results)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
