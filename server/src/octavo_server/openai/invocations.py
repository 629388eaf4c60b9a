"""Bodies of `/invocations`: `InvocationShape` has the fields that decide the endpoint."""

from typing import Any

from pydantic import BaseModel, ConfigDict, RootModel

from octavo_server.openai.chat import ChatCompletionRequest
from octavo_server.openai.completion import CompletionRequest


class InvocationShape(BaseModel):
    model_config = ConfigDict(extra="ignore")

    messages: Any = None
    prompt: Any = None


class InvocationRequest(RootModel[ChatCompletionRequest | CompletionRequest]):
    """The body as the API document declares it."""
