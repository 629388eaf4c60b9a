"""`python -m octavo_server.openai.api_server` runs `octavo serve`, for scripts written for vLLM's module."""

import sys

from octavo_server.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
