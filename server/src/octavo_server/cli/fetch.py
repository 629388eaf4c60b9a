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
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from octavo_engine.log_format import JsonFormatter, LogFormat, TextFormatter
from octavo_engine.settings.declare import Declared, setting

from octavo_server.cli.declared_flags import add_flags

logger = logging.getLogger("octavo.fetch")


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchFlags(Declared):
    to: Path | None = setting(
        None,
        "Folder for the files of the model.",
        metavar="DIR",
        unset="the cache in which `octavo serve MODEL` looks for it",
    )
    revision: str | None = setting(None, "Branch, tag or commit of a hf:// or ms:// model.", unset="the hub's default")
    load_format: Literal["auto", "safetensors", "pt", "gguf", "dummy"] = setting(
        "auto", "Format of the weights to download."
    )
    log_format: LogFormat = setting("text", "Format of log lines.")


def add_fetch_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="Model to download: hf://ORG/NAME, s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, az://CONTAINER/FOLDER, "
        "ms://ORG/NAME, pvc://CLAIM/PATH, file:///PATH, pkg://NAME.",
    )
    add_flags(parser, FetchFlags)


def fetch(args: argparse.Namespace) -> int:
    from octavo_engine.sources.resolve import fetch_model

    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter("fetch") if args.log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for library in ("httpx", "httpx2", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.ERROR)  # this command logs the progress itself
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, _end)
    started_s = time.monotonic()
    path = fetch_model(args.model, to=args.to, revision=args.revision, load_format=args.load_format)
    logger.info("%s: ready to serve after %.1f s", args.model, time.monotonic() - started_s)
    print(path)
    return 0


def _end(sig: int, _: object) -> None:
    """Exit at once: the next fetch resumes from the files on disk, as after a crash."""
    print("octavo: stopped by a signal; the next fetch resumes the download", file=sys.stderr, flush=True)
    os._exit(128 + sig)
