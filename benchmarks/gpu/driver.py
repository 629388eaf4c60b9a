"""Check and measure the engine on a GPU machine without network, within a budget of time.

Steps run in the order of their worth: machine, kernels, tokens, serve, speed, ranks. Each is a process of its own; a
failure costs its case only. FOLDER gets lines.jsonl, log.txt and summary.txt; at most 120 lines are printed at the end.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from gpu.report import LOG, STEPS, Line, append_line, forget_steps, read_lines, write_summary

ROOT = Path(__file__).parents[2]
SOURCES = ("engine/src", "server/src", "tests/support", "benchmarks")
MOST_S = {"machine": 60, "kernels": 140, "tokens": 130, "serve": 110, "speed": 400, "ranks": 200}  # on a GPU
LEAST_S, MARGIN_S = 8, 4  # no step starts with less; a step stops by itself before it is killed
MAX_LOG_BYTES = 12_000_000


def parse_arguments() -> argparse.Namespace:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="benchmarks/gpu/run", description=__doc__, formatter_class=style)
    parser.add_argument("folder", type=Path, help="folder of the results; lines of other steps stay in it")
    parser.add_argument("--budget", type=int, default=480, help="seconds of all steps. Default: 480")
    parser.add_argument("--wheels", type=folder, help="folder of packages to install first: see benchmarks/gpu/wheels")
    parser.add_argument("--peers", type=folder, help="folder with vllm/bin/python or sglang's. Default: no comparison")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: small sizes, interpreted kernels"
    )
    only = "a step, or its cases that a regular expression finds, such as kernels:'sample|bfloat16'; repeatable"
    parser.add_argument("--only", metavar="STEP[:CASES]", type=selection, action="append", help=only)
    usual = Path(tempfile.gettempdir(), f"octavo-gpu-{os.getuid()}")
    work = f"folder of packages, compiled kernels and models, which a later run uses again. Default: {usual}"
    parser.add_argument("--work", type=Path, default=usual, help=work)
    args = parser.parse_args()
    if args.peers is not None and not any(args.peers.glob("*/bin/python")):
        parser.error(f"--peers {args.peers}: it has neither vllm/bin/python nor sglang/bin/python")
    args.work.mkdir(mode=0o700, parents=True, exist_ok=True)
    if args.work.stat().st_uid != os.getuid():
        parser.error(f"{args.work} belongs to another user: give --work a folder of your own")
    (args.work / args.device).mkdir(exist_ok=True)
    args.folder.mkdir(parents=True, exist_ok=True)
    args.folder, args.work = args.folder.resolve(), args.work.resolve()
    return args


def folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text}: no such folder")
    return Path(text).resolve()


def selection(text: str) -> tuple[str, str]:
    step, _, match = text.partition(":")
    if step not in STEPS:
        raise argparse.ArgumentTypeError(f"{step}: no such step; steps are {', '.join(STEPS)}")
    return step, match


def environment(args: argparse.Namespace) -> dict[str, str]:
    """Return the variables of every step. The CPU only serves as a reference, so its C++ kernels aren't compiled."""
    paths = [*(ROOT / source for source in SOURCES), args.work / "metadata", args.work / "site"]
    paths += os.environ.get("PYTHONPATH", "").split(":")
    more = {
        "PYTHONPATH": ":".join(map(str, paths)),
        "PYTHONUNBUFFERED": "1",
        "OCTAVO_GPU_WORK": str(args.work / args.device),
        "OCTAVO_NATIVE": "0",
        "TRITON_CACHE_DIR": str(args.work / "triton"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if args.device == "cpu":
        more |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    if args.peers is not None:
        more["OCTAVO_GPU_PEERS"] = str(args.peers)
    return {"HOME": str(args.work), **os.environ, **more}


def install(wheels: Path, site: Path) -> None:
    """Install packages once. Raises CalledProcessError."""
    if not site.exists():
        options = ["-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", f"{site}.part"]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *wheels.glob("*.whl")], check=True)
        Path(f"{site}.part").rename(site)


def write_metadata(target: Path) -> None:
    """Write the versions of the distributions, which the packages read, but source trees lack."""
    for part in ("engine", "server"):
        project = tomllib.loads((ROOT / part / "pyproject.toml").read_text())["project"]
        name, version = project["name"], project["version"]
        info = target / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def run_step(name: str, match: str, args: argparse.Namespace, seconds: float) -> Line:
    """Run a step until it ends or its seconds are over; end everything that it has started.

    A step that is stopped with fewer seconds than it may take has only lacked time.
    """
    command = [sys.executable, "-m", f"gpu.steps.{name}", str(args.folder), "--device", args.device]
    log, began, status, cause = args.folder / LOG, time.monotonic(), "ok", ""
    command += ["--ends", str(began + seconds - MARGIN_S), "--match", match]
    with log.open("ab") as output:
        step = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment(args), cwd=ROOT, start_new_session=True
        )
        try:
            if code := step.wait(seconds):
                last = log.read_text(errors="replace").splitlines()[-3:]
                status, cause = "FAIL", f"exit code {code}: {' / '.join(last)[-300:]}"
        except subprocess.TimeoutExpired:
            status = "FAIL" if args.device == "cuda" and seconds == MOST_S[name] else "skip"
            cause = f"it was stopped after {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(step.pid, signal.SIGKILL)
            step.wait()
    return Line(name, "whole step", status, round(time.monotonic() - began), "s", cause)


def run_steps(args: argparse.Namespace) -> None:
    ends = time.monotonic() + args.budget
    chosen = args.only or [(step, "") for step in STEPS]
    forget_steps(args.folder, {name for name, _ in chosen})
    (args.folder / LOG).write_bytes(b"")
    if args.wheels is not None:
        install(args.wheels, args.work / "site")
    write_metadata(args.work / "metadata")
    for name, match in chosen:
        line = Line(name, "whole step", "skip", note="not run: no time was left")
        seconds = min(MOST_S[name] if args.device == "cuda" else args.budget, ends - time.monotonic())
        if seconds >= LEAST_S:
            print(f"{time.strftime('%H:%M:%S')} {name}: at most {seconds:.0f} s", flush=True)
            line = run_step(name, match, args, seconds)
        append_line(args.folder, line)


def main() -> int:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a limit of the caller's: the summary is still written
    try:
        run_steps(args)
    finally:
        log = args.folder / LOG
        log.write_bytes(log.read_bytes()[-MAX_LOG_BYTES:])
        print(*write_summary(args.folder), sep="\n")
    return 1 if any(line.status == "FAIL" for line in read_lines(args.folder)) else 0


if __name__ == "__main__":
    sys.exit(main())
