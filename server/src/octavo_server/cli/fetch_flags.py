"""The flags of `octavo fetch`."""

import argparse
from pathlib import Path

LOAD_FORMATS = ("auto", "safetensors", "pt", "gguf", "dummy")


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
