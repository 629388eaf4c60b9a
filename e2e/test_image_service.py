"""A model that takes images, in a volume of a `podTemplate`, answers about pictures through the Ingress."""

import base64
from pathlib import Path

import pytest
from octavo_e2e.cluster import Cluster, exposed
from octavo_testing.colour_llava import COLOURS, QUESTION, make_colour_llava
from octavo_testing.pictures import GREEN, RED, encoded, quarter

HOST, NAME, FOLDER = "colours.example.test", "colours", "/models/colours"


@pytest.fixture(scope="module")
def colours(cluster: Cluster, namespace: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The namespace of a service with two replicas, whose small model is the content of a ConfigMap."""
    folder: Path = make_colour_llava(tmp_path_factory.mktemp("model"))
    cluster.kubectl("create", "configmap", "weights", "-n", namespace, f"--from-file={folder}")
    mount = {"name": "engine", "volumeMounts": [{"name": "weights", "mountPath": FOLDER}]}
    volume = {"name": "weights", "configMap": {"name": "weights"}}
    spec = {
        "model": {"uri": f"file://{FOLDER}"},
        "engine": {"podTemplate": {"spec": {"volumes": [volume], "containers": [mount]}}},
        "resources": {"requests": {"cpu": "100m", "memory": "400Mi"}, "limits": {"memory": "3Gi"}},
    }
    cluster.serve(namespace, NAME, replicas=2, **spec, **exposed(HOST))
    cluster.until_ready(namespace, NAME)
    return namespace


@pytest.mark.parametrize("colour", COLOURS)
def test_a_picture_is_answered_through_the_ingress(colours: str, cluster: Cluster, colour: str) -> None:
    picture = encoded(quarter(COLOURS[colour], RED if colour == "green" else GREEN), "PNG")
    url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    with cluster.openai(HOST) as client:
        answer = client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": content}], temperature=0, max_tokens=1
        )
    assert answer.choices[0].message.content == colour
