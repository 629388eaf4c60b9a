"""Flags of `octavo route`. A flag that `octavo serve` has too has the same meaning in both commands."""

import argparse

from octavo_engine.wire.errors import StartupError

from octavo_server.cli.config_file import add_config_flag
from octavo_server.cli.declared_flags import add_flags, record_of
from octavo_server.cli.discovery import DiscoveryFlags
from octavo_server.router.settings import RouterSettings


def add_route_flags(parser: argparse.ArgumentParser) -> None:
    add_config_flag(parser)
    add_flags(parser, RouterSettings, DiscoveryFlags)


def settings_of(args: argparse.Namespace) -> RouterSettings:
    """`RouterSettings` from the flags. Raises StartupError for an invalid combination or an empty key."""
    settings = record_of(RouterSettings, args)
    if settings.admin_port and settings.admin_port == settings.port:
        raise StartupError(f"--admin-port and --port are both {settings.port}: give two different ports.")
    return settings
