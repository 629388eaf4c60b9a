"""`octavo up -f MANIFEST`: runs the InferenceServices of a manifest on this machine, behind one router.

The operator's package parses the manifest and returns the arguments of each engine; ports, resources, router and
secret are assigned as for `octavo up MODEL`. While the command runs, the API keys of a Secret are in a folder that only
its user can read.
"""

import argparse
import sys
from contextlib import ExitStack, redirect_stderr
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from octavo_engine.settings.config import EngineConfig
from octavo_engine.wire.errors import StartupError

from octavo_server.cli.plugins import operator_plugin
from octavo_server.cli.serve import engine_config_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestService:
    """One InferenceService. `args`, `env`: arguments and environment variables of each of its engines."""

    name: str
    served_names: tuple[str, ...]
    replicas: int
    args: tuple[str, ...]
    env: dict[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestServices:
    """All services of a manifest. `keys`: tenant -> API key; None if no key is required. `notes`: lines for the log
    about settings that have no effect on one machine."""

    services: tuple[ManifestService, ...]
    keys: dict[str, str] | None = field(repr=False)
    drain_timeout_s: float
    notes: tuple[str, ...]


def read_manifest(args: argparse.Namespace) -> ManifestServices:
    """Read the file of --file and parse its services. Raises StartupError, whose message has one line per error."""
    _check_flags(args)
    where = "standard input" if args.file == "-" else args.file
    try:
        text = sys.stdin.read() if args.file == "-" else Path(args.file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{where} can't be read: {getattr(error, 'strerror', None) or error}.") from error
    read_fleet = operator_plugin("fleet", command="octavo up -f")
    try:
        return msgspec.convert(read_fleet(text, brings_keys=bool(args.api_key_file)), ManifestServices)
    except ValueError as error:
        lines = str(error).splitlines()
        raise StartupError("\n".join(f"{where}: {line}" for line in lines)) from None


def write_key_files(fleet: ManifestServices, stack: ExitStack) -> list[str]:
    """Write one file per tenant, as Kubernetes mounts a Secret; return the router's flags that name the folder."""
    if fleet.keys is None:
        return []
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="octavo-keys-")))
    for tenant, key in fleet.keys.items():
        (folder / tenant).write_text(key)
    return ["--api-key-file", str(folder)]


def _check_flags(args: argparse.Namespace) -> None:
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("-f", "--file")
    for flag in ("--host", "--port", "--router-args", "--log-format"):
        own.add_argument(flag)
    own.add_argument("--api-key-file", nargs="+", action="extend")
    if rest := own.parse_known_args(args.typed)[1]:
        raise StartupError(
            f"{rest[0]} can't be combined with -f, as the manifest sets the flags of engines: set it in spec.model, "
            "spec.engine, spec.parallelism or spec.replicas."
        )


def parse_service(service: ManifestService) -> EngineConfig:
    """Read a service's arguments as `octavo serve` will. Raises StartupError if `octavo serve` would reject them."""
    from octavo_server.cli.main import build_parser

    errors = StringIO()
    try:
        with redirect_stderr(errors):
            args = build_parser("serve").parse_args(["serve", *service.args])
        return engine_config_of(args)
    except SystemExit:
        reason = errors.getvalue().strip().splitlines()[-1].partition("error: ")[2]
        raise StartupError(f"InferenceService {service.name}: spec.engine.extraArgs: {reason}") from None
    except StartupError as error:
        raise StartupError(f"InferenceService {service.name}: {error}") from None
