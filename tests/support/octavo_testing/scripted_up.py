"""`octavo up` with scripted engines: the real command, without compiling kernels.

`python -m octavo_testing.scripted_up up ...` runs the command; the command starts its children with a process id before
`serve` or `route`.
"""

import sys

from octavo_server.cli import serve
from octavo_server.cli.main import main
from octavo_server.up import child
from octavo_server.up.child_main import end_with_parent

from octavo_testing.scripted_serve import ScriptedLLM

MODULE = (sys.executable, "-P", "-m", "octavo_testing.scripted_up")

if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[0].isdecimal():
        end_with_parent(int(arguments.pop(0)))
    serve.AsyncLLM = ScriptedLLM  # type: ignore[misc]
    child.COMMAND = MODULE
    sys.exit(main(arguments))
