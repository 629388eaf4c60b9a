"""Compile what a router does for each request to C, by mypyc, in a folder that has octavo_server and octavo_engine.

The same source runs as it is, at about twice the CPU in these modules. Compiled modules lie beside their sources and
are imported in their place, so the folder has to be a copy: an installed one (images/router.Dockerfile), or
build/compiled (`make compiled`).
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

#: What is called for each request, but for classes whose annotations are read when the program runs (msgspec's), as
#: they lose their details; and for those that others inherit from (protocols, responses).
MODULES = """
octavo_engine/wire/hashing
octavo_server/exposition
octavo_server/http/{cork}
octavo_server/router/{activity,attempt,breaker,caller,decision,decision_log,ending,evening_out,exchange,fleet,forward}
octavo_server/router/{heads,metrics,picker,predictions,prefix_index,prompt,prompt_estimate,prompt_reader}
octavo_server/router/{proxy,rates,rendezvous,replica,replica_blocks,score,ticket,track,upstream,wait,waiting_room}
octavo_server/router/text/{chain,chains,chat_fields,cuts,recency,skeletons}
"""
#: Large, and not called for each request: what they return is any object.
UNREAD = """
aiohttp anyio fastapi huggingface_hub jinja2 llguidance obstore opentelemetry prometheus_client pydantic pydantic_core
safetensors starlette tokenizers torch tqdm transformers uvloop yaml zmq
"""
SETUP = """
from mypyc.build import mypycify
from setuptools import setup
setup(name="compiled", packages=[], ext_modules=mypycify({arguments!r}, opt_level="3", target_dir={folder!r}))
"""


def paths() -> list[str]:
    found = []
    for line in MODULES.split():
        folder, _, names = line.rpartition("/")
        found += [f"{folder}/{name}.py" for name in names.strip("{}").split(",")]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where octavo_server and octavo_engine lie; it is written to")
    folder = parser.parse_args().folder.resolve()
    with tempfile.TemporaryDirectory() as name:
        config, script = Path(name, "mypy.ini"), Path(name, "setup.py")
        ignored = "".join(f"[mypy-{module}.*]\nfollow_imports = skip\n" for module in UNREAD.split())
        config.write_text("[mypy]\nignore_missing_imports = True\nfollow_imports = silent\n" + ignored)
        script.write_text(SETUP.format(arguments=["--config-file", str(config), *paths()], folder=name))
        command = [sys.executable, str(script), "-q", "build_ext", "--inplace", "--build-temp", name, "--build-lib"]
        ended = subprocess.run([*command, name], cwd=folder, env=os.environ | {"MYPYPATH": str(folder)}, check=False)
    sys.exit(ended.returncode)


if __name__ == "__main__":
    main()
