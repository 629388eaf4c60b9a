"""`set_hub_token`: vLLM's `--hf-token`. The token is in the environment only, so that no log or endpoint shows it."""

import os

VARIABLE = "HF_TOKEN"


def set_hub_token(token: bool | str | None) -> None:
    """Use a token for downloads in this process and its children. True and None keep the one of the hub's client."""
    if isinstance(token, str):
        os.environ[VARIABLE] = token
