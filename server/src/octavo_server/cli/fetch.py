"""`octavo fetch MODEL`: downloads the files of a model so that it can be served; init containers of pods run it.

Standard output is the path to serve. The last line on standard error explains a failure, and in a container so does its
termination message. No module that needs torch is imported, and the modules that download only when the command runs.
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
        "model",
        metavar="MODEL",
        help="Model to download: hf://ORG/NAME, s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, az://CONTAINER/FOLDER, "
        "ms://ORG/NAME, pvc://CLAIM/PATH, file:///PATH, pkg://NAME.",
    )
    parser.add_argument(
        "--to",
        type=Path,
        metavar="DIR",
        help="Folder for the files of the model. Default: the cache in which `octavo serve MODEL` looks for it.",
    )
    parser.add_argument(
        "--revision",
        metavar="TEXT",
        help="Branch, tag or commit of a hf:// or ms:// model. Default: the hub's default.",
    )
    parser.add_argument(
        "--load-format", choices=LOAD_FORMATS, default="auto", help="Format of the weights to download. Default: auto."
    )
    parser.add_argument(
        "--log-format", choices=["text", "json"], default="text", help="Format of log lines. Default: text."
    )


def fetch(args: argparse.Namespace) -> int:
    from octavo_engine.log_format import JsonFormatter, TextFormatter
    from octavo_engine.sources.resolve import fetch_model

    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter("fetch") if args.log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for library in ("httpx", "httpx2", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.ERROR)  # this command logs the progress itself
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
    """Exit at once: the next fetch resumes from the files on disk, as after a crash."""
    print("octavo: stopped by a signal; the next fetch resumes the download", file=sys.stderr, flush=True)
    os._exit(128 + sig)
