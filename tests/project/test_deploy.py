"""Proves that the files of deploy/ ask for what the server has: flags, routes, port, user.

They were linted and checked against schemas, and never applied; this holds them to the code.
"""

import json
import re
from pathlib import Path

import pytest
import yaml

from dllm_jax.cli.entry import parse
from dllm_jax.serve.app import ROUTES
from dllm_jax.serve.metrics import HELP, STATES

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def manifest():
    return {
        one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    }


def instructions(name):
    """The exec form of each instruction of the last stage that has one."""
    stage = (DEPLOY / name).read_text().rpartition("\nFROM ")[2]
    found = re.findall(r"^(?:HEALTHCHECK .*)?(ENTRYPOINT|CMD) (\[.*\])$", stage, re.M)
    return {key: json.loads(value) for key, value in found if "import" not in value}


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_images_start_the_server_with_flags_that_exist(name):
    reported = instructions(name)
    args = parse([*reported["ENTRYPOINT"], *reported["CMD"]][1:])
    assert (args.verb, args.host, args.port) == ("serve", "0.0.0.0", 8000)
    text = (DEPLOY / name).read_text()
    assert "USER 10001" in text
    assert "EXPOSE 8000" in text
    assert "127.0.0.1:8000/health" in text


def test_manifest_probes_routes_that_exist_with_flags_that_exist():
    pod = manifest()["Deployment"]["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    args = parse([*instructions("Dockerfile.cuda")["ENTRYPOINT"][1:], *server["args"]])
    # A drain has time to end before the container is killed.
    sleep_s = server["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert args.drain_timeout + sleep_s < pod["terminationGracePeriodSeconds"]
    assert args.port == server["ports"][0]["containerPort"]
    paths = {path for path, method, _ in ROUTES if method == "GET"}
    assert server["livenessProbe"]["httpGet"]["path"] == "/live" in paths
    assert server["readinessProbe"]["httpGet"]["path"] == "/health" in paths
    startup = server["startupProbe"]
    assert startup["httpGet"] == server["readinessProbe"]["httpGet"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800  # a first compilation
    mounts = {one["mountPath"] for one in server["volumeMounts"]}
    assert str(Path(args.api_key_file).parent) in mounts
    assert pod["securityContext"]["runAsUser"] == 10001


def test_service_and_budget_select_the_pods():
    found = manifest()
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    assert found["Service"]["spec"]["selector"].items() <= labels
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"].items() <= labels


def test_pods_follow_the_queue_and_keep_what_is_compiled():
    found = manifest()
    deployment, scaler = found["Deployment"], found["HorizontalPodAutoscaler"]["spec"]
    target = {"kind": "Deployment", "name": deployment["metadata"]["name"]}
    assert scaler["scaleTargetRef"].items() >= target.items()
    (metric,) = scaler["metrics"]
    assert metric["pods"]["metric"]["name"] in HELP
    volumes = {one["name"]: one for one in deployment["spec"]["template"]["spec"]["volumes"]}
    claim = volumes["cache"]["persistentVolumeClaim"]["claimName"]
    assert claim == found["PersistentVolumeClaim"]["metadata"]["name"]


def test_alerts_are_about_metrics_and_states_that_exist():
    (group,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    assert len(group["rules"]) >= 5
    for rule in group["rules"]:
        names = set(re.findall(r"\bdllm_\w+", rule["expr"]))
        assert names
        assert names <= HELP.keys()
        assert set(re.findall(r'state="(\w+)"', rule["expr"])) <= set(STATES)
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"].endswith(".")
