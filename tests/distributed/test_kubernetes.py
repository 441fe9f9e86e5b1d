"""The LeaderWorkerSet manifest: what it says fits together, and, where the published schema is at hand, fits that."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest

from lmjax.cluster.ranks import START
from tests.server.live_server import ROOT

yaml = pytest.importorskip("yaml")
# config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml of github.com/kubernetes-sigs/lws
SCHEMA = os.environ.get("LMJAX_LWS_CRD")


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    return {doc["kind"]: doc for doc in yaml.safe_load_all((ROOT / "scripts/launch_k8s.yaml").read_text())}


def test_what_it_says_fits_together(manifests):
    group = manifests["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    leader, worker = group["leaderTemplate"], group["workerTemplate"]
    first, others = leader["spec"]["containers"][0], worker["spec"]["containers"][0]
    for name in ("image", "command", "args", "env", "resources", "volumeMounts"):
        assert first[name] == others[name], name
    devices = int(first["resources"]["limits"]["nvidia.com/gpu"]) * group["size"]
    assert first["command"] == ["lmjax", "serve"] and f"--tensor-parallel-size={devices}" in first["args"]
    assert group["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert {m["name"] for m in first["volumeMounts"]} == {v["name"] for v in leader["spec"]["volumes"]}
    # requests go to leaders alone, and only to ready ones
    service = manifests["Service"]["spec"]
    assert service["selector"].items() <= leader["metadata"]["labels"].items()
    assert not service["selector"].items() <= worker["metadata"]["labels"].items()
    assert service["ports"][0]["targetPort"] == first["ports"][0]["containerPort"] == 8000
    # /health is 200 while it loads: it says nothing of a start, and /ready fails while it drains
    paths = {"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/health"}
    for probe, path in paths.items():
        assert first[probe]["httpGet"] == {"path": path, "port": 8000}, probe
    assert first["startupProbe"]["periodSeconds"] * first["startupProbe"]["failureThreshold"] >= START + 1800


def test_pods_and_service_fit_kubernetes_schemas(manifests):
    """Published with each version of Kubernetes; unknown fields are errors."""
    kubernetes = pytest.importorskip("kubernetes_validate")
    version = kubernetes.latest_version()
    kubernetes.validate(manifests["Service"], version, strict=True)
    group = manifests["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    for template in (group["leaderTemplate"], group["workerTemplate"]):
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        kubernetes.validate(pod, version, strict=True)
        bad = copy.deepcopy(pod)
        bad["spec"]["containers"][0]["arguments"] = []
        with pytest.raises(kubernetes.ValidationError, match="arguments"):
            kubernetes.validate(bad, version, strict=True)


@pytest.mark.skipif(SCHEMA is None, reason="LMJAX_LWS_CRD names no file")
def test_it_fits_the_published_schema(manifests):
    jsonschema = pytest.importorskip("jsonschema")
    versions = yaml.safe_load(Path(SCHEMA).read_text())["spec"]["versions"]
    schema = next(v for v in versions if v["name"] == "v1")["schema"]["openAPIV3Schema"]
    _make_strict(schema)
    schema["properties"]["metadata"] = {"type": "object"}  # Kubernetes' own
    validator = jsonschema.Draft7Validator(schema)
    good = manifests["LeaderWorkerSet"]
    assert not [f"{list(error.absolute_path)}: {error.message}" for error in validator.iter_errors(good)]
    for change in ("size", "restartPolicy", "workerTemplate"):
        bad = copy.deepcopy(good)
        bad["spec"]["leaderWorkerTemplate"][change] = "wrong"
        assert list(validator.iter_errors(bad)), change
    bad = copy.deepcopy(good)
    bad["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]["arguments"] = []
    assert list(validator.iter_errors(bad)), "an unknown field"


def _make_strict(schema: Any) -> None:
    """Unknown fields are errors, as for ``kubectl apply``; the API's own types are JSON schema's."""
    if isinstance(schema, list):
        for one in schema:
            _make_strict(one)
    if not isinstance(schema, dict):
        return
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        schema["type"] = ["integer", "string"]
        schema.pop("anyOf", None)
    for one in list(schema.values()):
        _make_strict(one)
