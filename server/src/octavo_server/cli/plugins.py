"""What the operator's package adds to the `octavo` command, if it is installed.

It names its functions in its metadata (the entry points `octavo.infsvc`): this package doesn't import it, and needs
neither it nor a Kubernetes client.
"""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from octavo_engine.wire.errors import StartupError

GROUP = "octavo.infsvc"


def operator_plugin(name: str, *, command: str) -> Callable[..., Any]:
    """Raises StartupError with the command that installs it."""
    for entry in entry_points(group=GROUP, name=name):
        function: Callable[..., Any] = entry.load()
        return function
    raise StartupError(f"{command} needs the package octavo-operator. Install it with: pip install octavo-operator")
