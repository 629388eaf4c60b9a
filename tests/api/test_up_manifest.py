"""`octavo up -f` runs the services of a manifest on this machine, behind one router."""

from pathlib import Path

import httpx
import pytest
from octavo_testing.up_command import SERVING, all_exited, octavo_up

pytestmark = pytest.mark.slow

CHAT = """
apiVersion: serving.octavo.dev/v1alpha1
kind: InferenceService
metadata: {name: chat}
spec:
  model: {uri: MODEL, servedNames: [gpt-tiny, tiny]}
  replicas: 2
  engine:
    maxModelLen: 128
    extraArgs: [--load-format=dummy]
    env:
      - {name: GREETING, valueFrom: {secretKeyRef: {name: keys, key: alice}}}
  resources: {limits: {memory: 1Gi}}
  exposure: {ingress: {host: chat.example.test}}
  auth: {apiKeysSecretRef: {name: keys}}
  drain: {timeoutSeconds: 3}
"""
KEYS = """
apiVersion: v1
kind: Secret
metadata: {name: keys}
stringData: {alice: sk-alice}
data: {bob: c2stYm9i}
"""
CODE = """
apiVersion: serving.octavo.dev/v1alpha1
kind: InferenceService
metadata: {name: code}
spec:
  model: {uri: MODEL}
  engine: {extraArgs: [--load-format=dummy]}
  router: {ref: {name: chat}}
"""


def complete(up, model, key):
    return httpx.post(
        f"{up.url}/v1/completions",
        headers={"authorization": f"Bearer {key}"},
        json={"model": model, "prompt": "hello", "max_tokens": 4},
        timeout=240,
    )


def test_two_services_share_a_router_and_its_keys(tmp_path):
    with octavo_up(tmp_path, manifest=f"{CHAT}---{KEYS}---{CODE}") as up:
        up.wait_for_log(SERVING)
        assert "3 replicas serve gpt-tiny and code at" in up.log
        assert "chat: spec.resources has no effect here" in up.log
        assert "chat: spec.exposure has no effect here" in up.log
        names = {line.split("|")[0].strip() for line in up.log.splitlines()}
        assert names == {"up", "router", "chat-0", "chat-1", "code-0"}
        for model in ("gpt-tiny", "tiny", "code"):
            for key in ("sk-alice", "sk-bob"):
                assert complete(up, model, key).status_code == 200
        assert complete(up, "code", "sk-eve").status_code == 401
        assert complete(up, "chat", "sk-bob").status_code == 404  # the API knows the service only by its servedNames
        long = {"model": "tiny", "prompt": "x" * 200, "max_tokens": 4}
        refused = httpx.post(f"{up.url}/v1/completions", headers={"authorization": "Bearer sk-bob"}, json=long)
        assert "maximum context length is 128 tokens" in refused.text
        assert "sk-" not in up.log
        family = up.family
        commands = [" ".join(process.cmdline()) for process in family]
        assert not any("sk-" in command for command in commands)
        (router,) = [command for command in commands if "--api-key-file" in command]
        keys = Path(router.partition("--api-key-file ")[2].split()[0])
        assert {path.name for path in keys.iterdir()} == {"alice", "bob"}
        engine = up.child("replica-0").environ()
        assert engine["GREETING"] == "sk-alice"
        assert "--cache-isolation" in up.child("replica-0").cmdline()
        up.interrupt()
        assert up.exit_code() == 0
        assert all_exited(family)
    assert not keys.exists()


def test_api_key_file_replaces_the_secret_of_the_manifest(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("carol: sk-carol\n")
    manifest = CHAT.replace("replicas: 2", "replicas: 1").replace(
        "    env:\n      - {name: GREETING, valueFrom: {secretKeyRef: {name: keys, key: alice}}}\n", ""
    )
    with octavo_up(tmp_path, "--api-key-file", str(keys), manifest=manifest) as up:
        up.wait_for_log(SERVING)
        assert complete(up, "tiny", "sk-carol").status_code == 200
        assert complete(up, "tiny", "sk-alice").status_code == 401
