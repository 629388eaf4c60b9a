"""`octavo fetch MODEL`: a model's files onto this machine, ready to be served; a pod's init container runs it, too.

Standard output is the path to serve. An error is the last line on standard error, and the termination message of a pod.
Nothing that computes is imported.
"""

import argparse
import logging
import os
import signal
import sys
import time
from pathlib import Path

from octavo_engine.wire.errors import StartupError

from octavo_server.cli.termination_message import report_startup_error

LOAD_FORMATS = ("auto", "safetensors", "pt", "gguf", "dummy")

logger = logging.getLogger("octavo.fetch")


def add_fetch_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="hf://ORG/NAME, s3://BUCKET/FOLDER, pvc://CLAIM/PATH, file:///PATH, pkg://NAME"
    )
    parser.add_argument(
        "--to",
        type=Path,
        metavar="DIR",
        help="folder that becomes the model's (default: where `octavo serve MODEL` finds it: the hub's or our cache)",
    )
    parser.add_argument("--revision", metavar="TEXT", help="branch, tag or commit on the hub (default: the hub's own)")
    parser.add_argument(
        "--load-format", choices=LOAD_FORMATS, default="auto", help="which weights to fetch (default: auto)"
    )
    parser.add_argument("--log-format", choices=["text", "json"], default="text", help="(default: text)")


def fetch(args: argparse.Namespace) -> int:
    from octavo_engine.log_format import JsonFormatter, TextFormatter
    from octavo_engine.sources.fetch import fetch_model

    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter("fetch") if args.log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for library in ("httpx", "httpx2", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.ERROR)  # we say it ourselves
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, _end)
    started_s = time.monotonic()
    try:
        path = fetch_model(args.model, to=args.to, revision=args.revision, load_format=args.load_format)
    except StartupError as error:
        report_startup_error(error)
        return 1
    logger.info("%s: ready to serve after %.1f s", args.model, time.monotonic() - started_s)
    print(path)
    return 0


def _end(sig: int, _: object) -> None:
    """At once, whatever is under way: what lies there is as good as after any other end (sources.deposit)."""
    print("octavo: told to end; the next fetch goes on from here", file=sys.stderr, flush=True)
    os._exit(128 + sig)
