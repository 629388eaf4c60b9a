"""Requests of `soak.py`: their bodies, and how each of them ended for its client."""

import asyncio
import base64
import json
import random
import time
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import aiohttp
import support_path  # noqa: F401  (makes octavo_testing importable)
from http_client import words
from octavo_testing.tiny_vision import picture

TEXT, SIGHT = "text", "sight"
ADAPTERS = tuple(f"adapter-{i}" for i in range(4))
#: Different texts, images and schemas: so few that a busy machine sends each of them to each engine and router within
#: a quarter of an hour. What they cache by text or schema is then complete, and what grows later is no cache. The
#: images and the tokens are more than the engines' caches hold, so that these evict all the time.
TEXTS, IMAGES, SCHEMAS = 20, 400, 30
#: Requests to each engine that is never killed, before the first minute, and the length of the longest one in tokens.
WARM_UP_REQUESTS, LONGEST = 150, {TEXT: 1400, SIGHT: 240}
TIMEOUT_S = 90.0  # longer than a router holds a request
CHAT, COMPLETION, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
#: Kinds of requests, and how often each one is sent.
KINDS = {
    "chat": 3,
    **dict.fromkeys(("completion", "image", "adapter", "grammar", "tool", "cancel"), 2),
    **dict.fromkeys(("message", "response", "invalid"), 1),
}
GREEDY_KINDS = {**KINDS, "long": 6}
#: Last events of streams whose events have names.
LAST_EVENTS = {
    MESSAGES: ("message_stop", "error"),
    RESPONSES: ("response.completed", "response.incomplete", "response.failed", "error"),
}


@dataclass(slots=True)
class Request:
    """A request and its end, which is "open" until it has one. Times are seconds of the monotonic clock."""

    tenant: str
    kind: str
    router: str
    began_s: float
    end: str = "open"
    ended_s: float = 0.0
    replica: str = ""
    detail: str = ""


@dataclass(slots=True)
class Draft:
    """`leaves_s`: seconds after which the client leaves; None: it waits for the end."""

    path: str
    body: dict[str, Any]
    leaves_s: float | None = None


def draft(kind: str, dice: random.Random) -> Draft:
    number = dice.randrange(TEXTS)
    if kind == "completion":
        body = {"model": TEXT, "prompt": words(4 + number % 40, number)} | _common(dice)
        return Draft(COMPLETION, body | dice.choice([{}, {"logprobs": 2}, {"n": 2, "temperature": 1}]))
    if kind in ("message", "response"):
        path, field, limit = {
            "message": (MESSAGES, "messages", "max_tokens"),
            "response": (RESPONSES, "input", "max_output_tokens"),
        }[kind]
        messages = [{"role": "user", "content": words(1 + number % 20, number)}]
        stream = {"stream": dice.random() < 0.6}
        return Draft(path, {"model": TEXT, field: messages, limit: dice.randrange(16, 60), **stream})
    body = _chat(kind, number, dice) | _common(dice)
    if kind == "grammar":
        schema = {"name": "page", "schema": _schema(dice.randrange(SCHEMAS))}
        body |= {"response_format": {"type": "json_schema", "json_schema": schema}}
    elif kind == "tool":
        functions = [{"name": name, "parameters": _schema(number)} for name in ("f", "g")]
        named = {"type": "function", "function": {"name": "f"}}
        body |= {"tools": [{"type": "function", "function": function} for function in functions]}
        body |= {"tool_choice": dice.choice(["required", named]), "parallel_tool_calls": False}
    elif kind == "long":
        body |= {"n": dice.choice([1, 1, 8]), "temperature": 1, "max_tokens": 1000}
    elif kind == "invalid":
        body |= _invalid(dice)
    elif kind == "cancel":
        return Draft(CHAT, body | {"max_tokens": 100, "ignore_eos": True}, dice.uniform(0.002, 0.5))
    return Draft(CHAT, body)


def _common(dice: random.Random) -> dict[str, Any]:
    stream = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    sampling = [{"temperature": 0}, {"temperature": 1, "top_k": 20}, {"top_p": 0.9, "presence_penalty": 0.5}]
    limits = {"max_tokens": dice.randrange(4, 40), "ignore_eos": dice.random() < 0.5}
    return {**limits, **dice.choice(sampling), **(stream if dice.random() < 0.6 else {})}


def _chat(kind: str, number: int, dice: random.Random) -> dict[str, Any]:
    text = words(1 + number % 20, number)
    if kind == "image" or (kind == "cancel" and dice.random() < 0.3):
        content = [_image(dice.randrange(IMAGES)), {"type": "text", "text": text}]
        return {"model": SIGHT, "messages": [{"role": "user", "content": content}]}
    system = words(200 if kind == "long" else 20, number % 10)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    return {"model": dice.choice(ADAPTERS) if kind == "adapter" else TEXT, "messages": messages}


async def warm_up(url: str, model: str, secret: str) -> None:
    """Send prompts of random lengths: engines on CPUs keep memory for each number of tokens that they computed."""
    dice = random.Random(0)
    async with aiohttp.ClientSession(url, headers={"x-octavo-secret": secret}) as session:
        for _ in range(WARM_UP_REQUESTS):
            prompt = [dice.randrange(3, 250) for _ in range(dice.randrange(4, LONGEST[model]))]
            body = {"model": model, "prompt": prompt, "max_tokens": 2, "ignore_eos": True}
            async with session.post(COMPLETION, json=body) as response:
                response.raise_for_status()


@cache
def _image(number: int, *, is_whole: bool = True) -> dict[str, Any]:
    data = picture(number) if is_whole else picture(number)[:-60]
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(data).decode()}}


def _schema(number: int) -> dict[str, Any]:
    properties = {
        f"title{number}": {"type": "string", "maxLength": 6},
        "pages": {"enum": [number, number + 1]},
        "bound": {"type": "boolean"},
    }
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _invalid(dice: random.Random) -> dict[str, Any]:
    schema = {"type": "array", "uniqueItems": True}
    broken = {"role": "user", "content": [_image(dice.randrange(IMAGES), is_whole=False)]}
    return dice.choice([
        {"n": 10**6},
        {"model": "missing"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"model": SIGHT, "messages": [broken]},
    ])  # fmt: skip


async def send(session: aiohttp.ClientSession, request: Request, planned: Draft) -> None:
    """Send a request, and record its end in it."""
    try:
        async with (
            asyncio.timeout(planned.leaves_s or TIMEOUT_S),
            session.post(planned.path, json=planned.body) as response,
        ):
            request.replica = response.headers.get("x-octavo-replica", "")
            data = await response.read()
        request.end, request.detail = end_of(response.status, data, planned, request.kind)
    except TimeoutError:
        request.end = "cancelled" if planned.leaves_s else "hung"
    except aiohttp.ClientConnectorError as error:
        request.end, request.detail = "no connection", repr(error)
    except (aiohttp.ClientError, OSError) as error:
        request.end, request.detail = "cut", repr(error)
    finally:
        request.ended_s = time.monotonic()


def end_of(status: int, data: bytes, planned: Draft, kind: str) -> tuple[str, str]:
    """Name the end of a response that has arrived as a whole, and what is wrong with it."""
    text = data.decode(errors="replace")
    if status != 200:
        expected = {429: "limited", **(dict.fromkeys((400, 404), "rejected") if kind == "invalid" else {})}
        return expected.get(status, f"status {status}"), text[:500]
    try:
        if planned.body.get("stream"):
            named = LAST_EVENTS.get(planned.path)
            return _end_of_stream(text, planned.body) if named is None else _end_of_named(text, named)
        answer = json.loads(data)
        if planned.path in LAST_EVENTS:
            _check(bool(answer.get("stop_reason") or answer.get("status") in ("completed", "incomplete")), "no end")
            return "finished", ""
        _check(len(answer["choices"]) == planned.body.get("n", 1), "another number of choices")
        for choice in answer["choices"]:
            _check(choice["finish_reason"] is not None, "a choice without an end")
            if kind == "grammar" and choice["finish_reason"] == "stop":
                json.loads(choice["message"]["content"])
    except (ValueError, KeyError, TypeError) as error:
        return "malformed", f"{error!r}: {text[-2000:]}"
    return "finished", ""


def _end_of_named(text: str, last: tuple[str, ...]) -> tuple[str, str]:
    *frames, rest = text.split("\n\n")
    names = [frame.partition("\n")[0].removeprefix("event: ") for frame in frames]
    _check(not rest and names[-1] in last, "another last event")
    _check(sum(name in last for name in names) == 1, "several last events")
    return ("error event", frames[-1]) if names[-1] in ("error", "response.failed") else ("finished", "")


def _end_of_stream(text: str, body: dict[str, Any]) -> tuple[str, str]:
    *frames, rest = text.split("\n\n")
    events = [frame.removeprefix("data: ") for frame in frames if not frame.startswith(":")]
    _check(not rest and events.count("[DONE]") == 1 and events[-1] == "[DONE]", "not one [DONE] at the end")
    chunks = [json.loads(event) for event in events[:-1]]
    errors = [chunk for chunk in chunks if "error" in chunk]
    if errors:
        _check(errors == chunks[-1:], "an error event before the last one")
        return "error event", str(errors[0]["error"])
    _check(len({chunk["id"] for chunk in chunks}) == 1, "chunks of several responses")
    ends, num_tokens = Counter[int](), 0
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        _check(not ends[choice["index"]], "a chunk after a choice's end")
        num_tokens += len(choice.get("token_ids") or ())
        ends[choice["index"]] += choice["finish_reason"] is not None
    _check(ends == Counter(range(body.get("n", 1))), "a choice without an end")
    _check(num_tokens == chunks[-1]["usage"]["completion_tokens"], "another number of tokens than reported")
    return "finished", ""


def _check(holds: bool, fault: str) -> None:
    if not holds:
        raise ValueError(fault)
