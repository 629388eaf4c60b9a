"""Loads functions of the package octavo-operator for the `octavo` command, if that package is installed.

octavo-operator registers the functions as entry points of the group `octavo.infsvc`, so octavo-server neither imports
octavo-operator nor depends on it or on a Kubernetes client.
"""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from octavo_engine.wire.errors import StartupError

GROUP = "octavo.infsvc"


def operator_plugin(name: str, *, command: str) -> Callable[..., Any]:
    """Load the entry point `name`. Raises StartupError with the installation command if the package is missing."""
    for entry in entry_points(group=GROUP, name=name):
        function: Callable[..., Any] = entry.load()
        return function
    raise StartupError(f"{command} needs the package octavo-operator. Install it with: pip install octavo-operator")
