"""The files of examples/scaling: what they say of the server is so."""

import re
from typing import Any

import pytest
import yaml
from conftest import REPOSITORY
from ray.serve.schema import ServeDeploySchema

from draftgraph.cli.app import app as commands
from draftgraph.serve.app import health_routes
from draftgraph.serve.engine import EXIT_SECONDS
from draftgraph.serve.guard import OPEN
from draftgraph.serve.ray import DOOR, REPLICA, app
from draftgraph.serve.run import LAST_WORDS
from draftgraph.serve.settings import ServerSettings

FOLDER = REPOSITORY / "examples" / "scaling"
MANIFESTS = {one["kind"]: one for one in yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())}
POD = MANIFESTS["Deployment"]["spec"]["template"]
SERVER = POD["spec"]["containers"][0]
ENVIRONMENT = {one["name"]: one["value"] for one in SERVER["env"]}


def seconds_of(text: str) -> float:
    return float(re.fullmatch(r"(\d+)s", text)[1])  # type: ignore[index]


def test_probes_ask_for_what_the_server_has():
    paths = {name: SERVER[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert paths == {"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/health"}
    assert "/health" in {route.path for route in health_routes().routes}
    assert {SERVER[name]["httpGet"]["port"] for name in paths} == {SERVER["ports"][0]["name"]}
    assert POD["metadata"]["annotations"]["prometheus.io/path"] == "/metrics"
    assert "DRAFTGRAPH_KEY_FILE" in ENVIRONMENT and "/metrics" not in OPEN  # so Prometheus needs a key
    assert "credentials_file" in (REPOSITORY / "docs" / "scaling.md").read_text()


def test_what_is_under_way_when_a_pod_ends_has_its_time():
    (_, waits) = SERVER["lifecycle"]["preStop"]["exec"]["command"]
    grace = float(ENVIRONMENT["DRAFTGRAPH_GRACE"])
    assert grace > ServerSettings.deadline
    assert POD["spec"]["terminationGracePeriodSeconds"] > float(waits) + grace + LAST_WORDS + EXIT_SECONDS


def test_the_pod_is_the_dockerfiles():
    dockerfile = (REPOSITORY / "Dockerfile").read_text()
    assert f"USER {POD['spec']['securityContext']['runAsUser']}:" in dockerfile
    assert f"ENV PORT={SERVER['ports'][0]['containerPort']}\n" in dockerfile
    mounted = {one["mountPath"] for one in SERVER["volumeMounts"]}
    assert "/cache" in mounted and "DRAFTGRAPH_CACHE=/cache" in dockerfile
    assert {one["name"] for one in SERVER["volumeMounts"]} == {one["name"] for one in POD["spec"]["volumes"]}


def test_variables_are_options_of_the_server():
    from typer.main import get_command

    options = {option.envvar for option in get_command(commands).commands["serve"].params}  # type: ignore[attr-defined]
    assert ENVIRONMENT.keys() <= options


def test_kinds_find_each_other_by_their_labels():
    labels = POD["metadata"]["labels"]
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert MANIFESTS[kind]["spec"]["selector"]["matchLabels"] == labels
    assert MANIFESTS["Service"]["spec"]["selector"] == labels
    backend = MANIFESTS["Ingress"]["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
    assert backend["name"] == MANIFESTS["Service"]["metadata"]["name"]


def nginx() -> dict[str, str]:
    """Directives without blocks, by their names."""
    lines = [re.sub(r"\s+#.*", "", line).strip() for line in (FOLDER / "nginx.conf").read_text().splitlines()]
    return dict(line.rstrip(";").split(maxsplit=1) for line in lines if re.fullmatch(r"\w+ [^{]*;", line))


def test_the_proxy_waits_as_long_as_an_answer_may_take_and_gathers_nothing_up():
    found = nginx()
    assert found["proxy_buffering"] == "off" and found["proxy_http_version"] == "1.1"
    assert seconds_of(found["proxy_read_timeout"]) > ServerSettings.deadline
    assert seconds_of(found["keepalive_timeout"]) < ServerSettings.idle_seconds
    assert found["client_max_body_size"] == "4m" and ServerSettings.max_body == 4 << 20
    assert "non_idempotent" in found["proxy_next_upstream"] and "http_503" in found["proxy_next_upstream"]


def test_the_ingress_does_what_the_proxy_does():
    said, start = MANIFESTS["Ingress"]["metadata"]["annotations"], "nginx.ingress.kubernetes.io/"
    found = nginx()
    same = ("proxy-buffering", "proxy-next-upstream", "proxy-next-upstream-tries")
    assert {name: said[start + name] for name in same} == {name: found[name.replace("-", "_")] for name in same}
    assert f"{said[start + 'proxy-read-timeout']}s" == found["proxy_read_timeout"]


@pytest.fixture
def deployed(tmp_path) -> Any:
    """The application of ray.yaml, with a file of keys that is there."""
    file = ServeDeploySchema.model_validate(yaml.safe_load((FOLDER / "ray.yaml").read_text()))
    (application,) = file.applications
    assert application.import_path == "draftgraph.serve.ray:app"
    keys = tmp_path / "keys"
    keys.write_text("key")
    return app(application.args | {"key_file": str(keys)})


def test_the_file_for_ray_makes_the_application(deployed):
    door = deployed._bound_deployment
    (replicas,) = (one._bound_deployment for one in door.init_args)
    assert (door.name, replicas.name) == (DOOR, REPLICA)
    assert door.num_replicas == 8
    scaling = replicas._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.upscale_delay_s) == (2, 8, 15)
    assert replicas._deployment_config.graceful_shutdown_timeout_s == 600
    (service,) = replicas.init_args
    assert not service.settings.api_keys  # keys are not sent through the cluster
