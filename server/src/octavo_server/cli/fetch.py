"""`octavo fetch MODEL`: a model's files onto this machine, ready to be served; a pod's init container runs it, too.

Standard output is the path to serve. The last line on standard error says what went wrong: it ends up in the status
of a pod. Nothing that computes is imported.
"""

import argparse
import logging
import os
import signal
import sys
import time

from octavo_engine.log_format import JsonFormatter, TextFormatter
from octavo_engine.sources.fetch import fetch_model
from octavo_engine.wire.errors import StartupError

logger = logging.getLogger("octavo.fetch")


def fetch(args: argparse.Namespace) -> int:
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
        print(f"octavo: {error}", file=sys.stderr)
        return 1
    logger.info("%s: ready to serve after %.1f s", args.model, time.monotonic() - started_s)
    print(path)
    return 0


def _end(sig: int, _: object) -> None:
    """At once, whatever is under way: what lies there is as good as after any other end (sources.download_dir)."""
    print("octavo: told to end; the next fetch goes on from here", file=sys.stderr, flush=True)
    os._exit(128 + sig)
