"""Paths of Anthropic's Messages API: their errors and API keys have Anthropic's form."""

MESSAGES, COUNT_TOKENS, RENDER = "/v1/messages", "/v1/messages/count_tokens", "/v1/messages/render"


def is_messages_path(path: str) -> bool:
    """`path` may begin with the server's root path."""
    return path.endswith((MESSAGES, COUNT_TOKENS, RENDER))
