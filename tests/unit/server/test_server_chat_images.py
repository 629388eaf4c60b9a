"""A chat request forgets its images, which are long, once its prompt is made."""

import json

from octavo_server.config import RequestLimits
from octavo_server.openai.chat import ChatCompletionRequest
from octavo_server.openai.request_parser import parse_request


def test_images_are_forgotten_and_texts_stay() -> None:
    url = {"type": "image_url", "image_url": {"url": "data:;base64,AAAA"}}
    messages = [
        {"role": "user", "content": ["a", url, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
        {"role": "user", "content": "d"},
    ]
    body = parse_request(json.dumps({"messages": messages}).encode(), ChatCompletionRequest, RequestLimits())
    assert "AAAA" in str(body.conversation())
    body.drop_images()
    assert "AAAA" not in f"{body.conversation()} {body!r}"
    contents = [message["content"] for message in body.conversation()]
    assert contents == [["a", {"type": "text", "text": "b"}], [{"type": "text", "text": "c"}], "d"]
