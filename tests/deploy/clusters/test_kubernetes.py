"""The manifests of Kubernetes, checked without a cluster: schemas, settings, commands, ports, probes, rights."""

from __future__ import annotations

import base64
import importlib.util
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs import schemas
from pydantic import BaseModel
from tests.servers import require_package

from penstock.console import launch
from penstock.console.cli.main import app as penstock
from penstock.deploy import health, nats_config
from penstock.deploy.bootstrap import ConnectionSettings
from penstock.deploy.make_secrets import make_secrets
from penstock.protocol.config.run_file import load
from penstock.reward_service.settings import RewardSettings
from penstock.rollout_service.settings import RolloutSettings
from penstock.trainer.commands.run_command import USAGE_ERROR
from penstock.trainer.settings import TrainerSettings

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install 'penstock[dev]'")

DEPLOY = Path(__file__).parents[3] / "deploy"
FOLDER = DEPLOY / "kubernetes"
RUN_FILE = FOLDER / "base" / "run.toml"
RELEASE = "1.37"
OVERLAYS = ("cpu", "gpu", "gpu-nodes")
NATS_HOSTS = ("nats-0.nats", "nats-1.nats", "nats-2.nats")
OURS: dict[str, type[BaseModel]] = {
    "bootstrap": ConnectionSettings,
    "reward": RewardSettings,
    "rollout": RolloutSettings,
    "trainer": TrainerSettings,
}
Object = dict[str, Any]


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Object]]:
    """What `kubectl apply -k` of each overlay would send, with newly made secrets."""
    require_package("kubectl", "kubernetes-client")
    folder = tmp_path_factory.mktemp("kubernetes") / "kubernetes"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("secrets"))
    make_secrets(folder / "base" / "secrets", NATS_HOSTS)
    done = {}
    for overlay in OVERLAYS:
        kustomize = ["kubectl", "kustomize", str(folder / "overlays" / overlay)]
        made = subprocess.run(kustomize, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr
        done[overlay] = list(yaml.safe_load_all(made.stdout))
    return done


def of_kind(objects: list[Object], *kinds: str) -> dict[str, Object]:
    return {one["metadata"]["name"]: one for one in objects if one["kind"] in kinds}


def pods(objects: list[Object]) -> dict[str, Object]:
    found = {name: one["spec"] for name, one in of_kind(objects, "Deployment", "StatefulSet", "Job").items()}
    return {name: spec["template"] for name, spec in (found | jobs_of_sets(objects)).items()}


def jobs_of_sets(objects: list[Object]) -> dict[str, Object]:
    sets = of_kind(objects, "JobSet")
    return {name: job["template"]["spec"] for name, one in sets.items() for job in one["spec"]["replicatedJobs"]}


def containers(pod: Object) -> Iterator[Object]:
    yield from pod["spec"].get("initContainers", [])
    yield from pod["spec"]["containers"]


def environment(container: Object, objects: list[Object]) -> dict[str, str]:
    """Every variable of a container, those of its config maps included."""
    maps = of_kind(objects, "ConfigMap")
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        found |= maps[source["configMapRef"]["name"]]["data"]
    return found | {one["name"]: one["value"] for one in container.get("env", []) if "value" in one}


@pytest.fixture(params=OVERLAYS)
def objects(request: pytest.FixtureRequest, rendered: dict[str, list[Object]]) -> list[Object]:
    return rendered[request.param]


# ── the files ─────────────────────────────────────────────────────────────────────────────────────


def test_the_configuration_of_nats_is_the_generated_one() -> None:
    """Kustomize reads no file outside its folder: its own must be what the rights give, for the servers of a cluster."""
    assert nats_config.main(["--tls", "/etc/nats/tls", "--cluster", "--check", str(FOLDER / "base" / "nats.conf")]) == 0
    assert nats_config.main(["--tls", "/etc/nats/tls", "--check", str(DEPLOY / "nats.conf")]) == 0


def test_the_servers_of_nats_are_a_cluster(objects: list[Object]) -> None:
    """As many servers as replicas, under the names that clients and routes use, each with a name of its own."""
    servers = of_kind(objects, "StatefulSet")["nats"]["spec"]
    (container,) = containers(servers["template"])
    connection = of_kind(objects, "ConfigMap")["connection"]["data"]
    names = [f"nats-{number}.{servers['serviceName']}" for number in range(servers["replicas"])]
    assert names == list(NATS_HOSTS)
    settings = load(ConnectionSettings, environ=connection).settings.nats
    assert settings.addresses == tuple(f"tls://{name}:4222" for name in names)
    assert settings.replicas == servers["replicas"] == 3
    assert container["env"] == [{"name": "NATS_SERVER_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]
    routes = base64.b64decode(of_kind(objects, "Secret")["nats-passwords"]["data"]["routes.conf"]).decode()
    assert all(f"@{name}:6222" in routes for name in names)
    service = of_kind(objects, "Service")["nats"]["spec"]
    assert service["publishNotReadyAddresses"] is True, "else none is ready before it has found the others"
    assert servers["podManagementPolicy"] == "Parallel"
    policy = of_kind(objects, "NetworkPolicy")["nats-routes"]["spec"]
    assert policy["ingress"][0]["ports"] == policy["egress"][0]["ports"] == [{"port": 6222}]
    assert of_kind(objects, "PodDisruptionBudget")["nats"]["spec"]["maxUnavailable"] == 1


def test_every_object_fits_the_schema_of_its_kind(objects: list[Object]) -> None:
    """The schemas of Kubernetes accept all, without an unknown field; of a JobSet, whose controller is no part of it, its Jobs."""
    assert len(objects) > 25
    for one in objects:
        if one["kind"] == "JobSet":
            assert set(one["spec"]) == {"suspend", "network", "failurePolicy", "replicatedJobs"}
            for job in one["spec"]["replicatedJobs"]:
                assert set(job) == {"name", "replicas", "template"}
                made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": one["metadata"], **job["template"]}
                kubernetes_validate.validate(made, RELEASE, strict=True)
        else:
            kubernetes_validate.validate(one, RELEASE, strict=True)


def test_the_pod_that_copies_the_inputs_fits_the_restricted_namespace(objects: list[Object]) -> None:
    """It mounts the trainer's claim for writing, with the rights that the namespace allows."""
    pod = yaml.safe_load((FOLDER / "copy-inputs.yaml").read_text())
    kubernetes_validate.validate(pod, RELEASE, strict=True)
    trainer = pods(objects)["trainer"]["spec"]
    assert pod["spec"]["securityContext"] == trainer["securityContext"]
    assert pod["spec"]["volumes"][0] in trainer["volumes"]
    assert pod["spec"]["containers"][0]["securityContext"] == trainer["containers"][0]["securityContext"]
    assert pod["metadata"]["namespace"] in of_kind(objects, "Namespace")


def test_the_schema_refuses_a_misspelt_field(objects: list[Object]) -> None:
    pod = next(one for one in objects if one["kind"] == "Deployment")
    wrong = {**pod, "spec": {**pod["spec"], "replicaz": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, RELEASE, strict=True)


# ── what is started ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("role", OURS)
def test_every_setting_of_a_service_exists(objects: list[Object], role: str) -> None:
    """Environment and run file are accepted by the service's own settings; the file is mounted where the command names it."""
    pod = pods(objects)[role]
    container = next(one for one in containers(pod) if one["name"] == role)
    given = {k: v for k, v in environment(container, objects).items() if k.startswith("PENSTOCK_") and "__" in k}
    loaded = load(OURS[role], files=[RUN_FILE], environ=given)
    assert str(RUN_FILE) in loaded.origins["run.id"]
    for variable in given:
        section, key = variable.removeprefix("PENSTOCK_").lower().split("__")
        assert loaded.origins[f"{section}.{key}"] == f"environment {variable}"
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert container["args"][-1] == f"{mounts['/etc/penstock']['mountPath']}/run.toml"
    assert environment(container, objects)["PENSTOCK_NATS__USER"] == {"bootstrap": "admin"}.get(role, role)


@pytest.mark.parametrize("role", OURS)
def test_every_command_is_one_that_there_is(objects: list[Object], role: str) -> None:
    """The images start `python -P -m ARGS`: the module exists, and a verb of penstock takes its arguments."""
    container = next(one for one in containers(pods(objects)[role]) if one["name"] == role)
    module, *rest = container["args"]
    assert importlib.util.find_spec(f"{module}.__main__") is not None
    dockerfile = (DEPLOY / "docker" / f"{'reward' if role == 'bootstrap' else role}.Dockerfile").read_text()
    assert 'ENTRYPOINT ["python", "-P", "-m"]' in dockerfile
    if module == "penstock":
        rest = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in rest]
        command, bound, _ = penstock.parse_args(rest, exit_on_error=False, print_error=False)
        assert command.__name__ in ("train", "bootstrap")
        assert str(RUN_FILE.name) in str(bound)


def test_the_probe_of_a_worker_takes_its_arguments(objects: list[Object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command is the health check with a role and an id that the check's own parser accepts."""
    worker = next(container for container in containers(pods(objects)["rollout"]) if container["name"] == "rollout")
    for probe in ("startupProbe", "livenessProbe"):
        shell, flag, line = worker[probe]["exec"]["command"]
        assert (shell, flag) == ("sh", "-c")
        words = subprocess.run(
            ["sh", "-c", line.replace("python", "echo", 1)], capture_output=True, text=True, check=True
        ).stdout.split()
        assert words[:3] == ["-P", "-m", "penstock.deploy.health"]
        monkeypatch.setattr("sys.argv", ["health", *words[3:]])
        monkeypatch.setenv("PENSTOCK_NATS__URL", "nats://127.0.0.1:1")
        assert health.main() == 1, "it parses, and finds no server"


def test_sglang_is_started_as_under_compose(rendered: dict[str, list[Object]]) -> None:
    """The options that a worker requires of its engine are the same, and the worker finds it in its own pod."""
    pod = pods(rendered["gpu"])["rollout"]
    engine, worker = containers(pod)
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["sglang"]["command"]
    own = ("--model-path", "--host", "--port", "--tp-size", "--dp-size", "--mem-fraction-static")
    assert {one for one in engine["args"] if not one.startswith(own)} == {
        one for one in compose if one.startswith("--") and not one.startswith(own)
    }
    url = environment(worker, rendered["gpu"])["PENSTOCK_WORKER__ENGINE_URL"]
    assert {f"--host={url.split('/')[2].split(':')[0]}", f"--port={url.rsplit(':', 1)[1]}"} <= set(engine["args"])
    assert engine["restartPolicy"] == "Always", "it must outlive the worker that drains"
    cache = next(mount for mount in engine["volumeMounts"] if mount["mountPath"] == "/cache")
    assert cache["readOnly"]
    assert all(
        one["resources"]["limits"].get("nvidia.com/gpu", "0") == want for one, want in ((engine, "1"), (worker, "0"))
    )


def test_the_nodes_of_a_trainer_find_each_other(rendered: dict[str, list[Object]]) -> None:
    """Each pod is a node by its index; they meet at the first one's name, on any port, and share checkpoints."""
    objects = rendered["gpu-nodes"]
    job = jobs_of_sets(objects)["trainer"]
    (container,) = containers(job["template"])
    typed = [
        [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in container["args"][1:]]
        for index in range(job["completions"])
    ]
    found = [launch.find_nodes(penstock.parse_args(words)[1].kwargs["nodes"], {}) for words in typed]
    one = of_kind(objects, "JobSet")["trainer"]["spec"]
    first = f"trainer-{one['replicatedJobs'][0]['name']}-0-0.{one['network']['subdomain']}"
    assert found == [launch.Nodes(job["completions"], index, f"{first}:{launch.RENDEZVOUS_PORT}") for index in range(2)]
    assert one["network"]["enableDNSHostnames"] is True
    assert one["suspend"] is True
    assert (job["completionMode"], job["parallelism"], job["backoffLimit"]) == ("Indexed", job["completions"], 0)
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [USAGE_ERROR]
    assert one["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert int(environment(container, objects)["PENSTOCK_TRAINER__NUM_RANKS"]) == gpus * job["completions"]
    assert of_kind(objects, "PersistentVolumeClaim")["runs"]["spec"]["accessModes"] == ["ReadWriteMany"]
    policy = of_kind(objects, "NetworkPolicy")["trainer-nodes"]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= job["template"]["metadata"]["labels"].items()
    assert "Job/trainer" not in {f"{one['kind']}/{one['metadata']['name']}" for one in objects}
    single = pods(rendered["gpu"])["trainer"]["spec"]
    for key in ("securityContext", "volumes", "automountServiceAccountToken"):
        assert job["template"]["spec"][key] == single[key], "all else is as with one node"


def test_the_trainer_has_as_many_gpus_as_ranks(rendered: dict[str, list[Object]]) -> None:
    (trainer,) = containers(pods(rendered["gpu"])["trainer"])
    ranks = environment(trainer, rendered["gpu"])["PENSTOCK_TRAINER__NUM_RANKS"]
    assert trainer["resources"]["limits"]["nvidia.com/gpu"] == ranks
    assert "nvidia.com" not in str(rendered["cpu"])


# ── what is reached ───────────────────────────────────────────────────────────────────────────────


def test_ports_match(objects: list[Object]) -> None:
    """Every service leads to a port of its pod, and the addresses of the connection to a service."""
    workloads = pods(objects)
    services = of_kind(objects, "Service")
    for name, service in services.items():
        pod = workloads[name]
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        open_ports = {port["containerPort"] for one in containers(pod) for port in one.get("ports", [])}
        assert {port["port"] for port in service["spec"]["ports"]} <= open_ports
    connection = of_kind(objects, "ConfigMap")["connection"]["data"]
    for url in (*connection["PENSTOCK_NATS__URL"].split(","), connection["PENSTOCK_S3__ENDPOINT"]):
        assert url.startswith(("tls://", "https://"))
        host, port = url.split("//")[1].split(":")
        assert int(port) in {one["port"] for one in services[host.rpartition(".")[2]]["spec"]["ports"]}
    metrics = tomllib.loads(RUN_FILE.read_text())["metrics"]
    for role in ("trainer", "rollout"):
        container = next(one for one in containers(workloads[role]) if one["name"] == role)
        assert container["ports"][0] == {"containerPort": metrics[f"{role}_port"], "name": "metrics"}
    assert load(RewardSettings, environ=environment(next(containers(workloads["reward"])), objects)).settings
    assert "listen: 0.0.0.0:4222" in (DEPLOY / "nats.conf").read_text()


def test_probes_ask_for_what_is_there(objects: list[Object]) -> None:
    """Every long-running container has probes, at ports and paths that its program has."""
    paths = {"reward": set(schemas.openapi()["paths"]), "s3": {"/minio/health/live"}}
    for name, pod in pods(objects).items():
        for container in containers(pod):
            if name in ("bootstrap", "trainer"):  # Jobs: they end by themselves, and a hung step is an alert
                continue
            assert "startupProbe" in container, name
            for probe in (
                container[key] for key in ("startupProbe", "readinessProbe", "livenessProbe") if key in container
            ):
                if "httpGet" in probe:
                    assert probe["httpGet"]["path"] in paths[name]
                    assert probe["httpGet"]["port"] in {port["name"] for port in container["ports"]}
                    assert probe["httpGet"]["scheme"] == "HTTPS"
                else:
                    assert probe["exec"]["command"]
    assert "http: 127.0.0.1:8222" in (DEPLOY / "nats.conf").read_text(), "the probe of NATS asks there"


def test_the_network_lets_through_what_is_needed(objects: list[Object]) -> None:
    """All is denied; clients reach NATS and S3 on their ports, and the policies select pods that there are."""
    policies = of_kind(objects, "NetworkPolicy")
    assert policies["deny-all"]["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    workloads = pods(objects)
    clients = {name for name, pod in workloads.items() if pod["metadata"]["labels"].get("penstock/client") == "yes"}
    assert clients == set(OURS)
    for name, service in of_kind(objects, "Service").items():
        ports = {rule["port"] for entry in policies[name]["spec"]["ingress"] for rule in entry["ports"]}
        assert {port["port"] for port in service["spec"]["ports"]} == ports
    (entries,) = [policies["clients"]["spec"]["egress"]]
    reached = {entry["to"][0]["podSelector"]["matchLabels"]["app"]: entry["ports"][0]["port"] for entry in entries}
    assert reached == {"nats": 4222, "s3": 9000}


# ── what a pod may do ─────────────────────────────────────────────────────────────────────────────


def test_no_pod_has_more_rights_than_it_needs(objects: list[Object]) -> None:
    """Non-root, no capabilities, no token of the cluster; the root is read-only but for SGLang, and resources are bounded."""
    for name, pod in pods(objects).items():
        spec = pod["spec"]
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True, name
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False, "a service `penstock` would become PENSTOCK_… variables"
        for container in containers(pod):
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["readOnlyRootFilesystem"] is (container["name"] != "sglang")
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])
            assert "memory" in container["resources"]["limits"]
            tag = container["image"].rpartition(":")[2]
            assert any(letter.isdigit() for letter in tag), container["image"]


def test_each_role_has_its_own_secrets_only(objects: list[Object]) -> None:
    """Files that variables name are mounted; a role's Secret holds its own NATS password and no other."""
    secrets = of_kind(objects, "Secret")
    passwords = {name: one["data"].get("nats_password") for name, one in secrets.items() if name.endswith("-secrets")}
    assert len(set(passwords.values())) == len(passwords) == 4
    keys = {one["data"].get("s3_secret_key") for name, one in secrets.items() if name.endswith("-secrets")}
    assert len(keys) == 4, "each role has an S3 user of its own; the store's own user is the bootstrap's"
    signing = {name for name, one in secrets.items() if "signing.key" in one["data"]}
    assert signing == {"trainer-secrets"}
    assert not any("ca.key" in secret["data"] for secret in secrets.values())
    for name, pod in pods(objects).items():
        volumes = {one["name"]: one for one in pod["spec"].get("volumes", [])}
        mounted = {one["secret"]["secretName"] for one in volumes.values() if "secret" in one}
        assert mounted <= set(secrets)
        assert mounted <= {f"{name}-secrets", f"{name}-tls", "s3-root"}
        for one in containers(pod):
            mounts = {mount["mountPath"]: volumes.get(mount["name"]) for mount in one["volumeMounts"]}
            for variable, value in environment(one, objects).items():
                if variable.endswith("_FILE"):
                    folder, _, key = value.rpartition("/")
                    volume = mounts[folder]
                    assert volume is not None
                    assert key in secrets[volume["secret"]["secretName"]]["data"], (name, variable)


def test_a_pod_has_time_to_drain(objects: list[Object]) -> None:
    """A worker's time to stop is longer than worker.finish_s; budgets for disruption select pods that there are."""
    workloads = pods(objects)
    finish_s = RolloutSettings().worker.finish_s
    assert workloads["rollout"]["spec"]["terminationGracePeriodSeconds"] > finish_s + 10
    for name, budget in of_kind(objects, "PodDisruptionBudget").items():
        assert budget["spec"]["selector"]["matchLabels"].items() <= workloads[name]["metadata"]["labels"].items()
    scaler = of_kind(objects, "HorizontalPodAutoscaler")["reward"]["spec"]
    assert "replicas" not in of_kind(objects, "Deployment")[scaler["scaleTargetRef"]["name"]]["spec"]


def test_a_trainer_that_explains_its_error_is_not_started_again(objects: list[Object]) -> None:
    """Exit code 2 ends the Job; an eviction does not count as a failure."""
    if "trainer" not in of_kind(objects, "Job"):
        pytest.skip("a JobSet: its own test")
    job = of_kind(objects, "Job")["trainer"]["spec"]
    assert job["suspend"] is True, "before its inputs and streams are there it would end with that error"
    rules = job["podFailurePolicy"]["rules"]
    assert rules[0] == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    assert rules[1]["onExitCodes"]["values"] == [USAGE_ERROR]
