"""A Job of Kubernetes: `kubectl apply`, `get`, `delete`. The claim holds the folder of runs, at the same path as here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from penstock.console.web.launchers.launcher import Found, Launcher, Start, ask
from penstock.console.web.problems import Problem

_Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$")]
_ABSENT = ("NotFound", "not found")
_GRACE_S = 300  # SIGTERM makes the trainer write a checkpoint


class KubernetesOptions(BaseModel):
    """What the Job's pod is."""

    model_config = ConfigDict(extra="forbid")

    image: str = Field(max_length=255, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$", description="Image with Penstock.")
    claim: _Name = Field(description="Persistent volume claim with the folder of runs.")
    namespace: _Name = "default"
    service_account: _Name | None = None
    environment_secret: _Name | None = Field(None, description="Secret whose keys are PENSTOCK_ variables.")
    gpus: int | None = Field(None, ge=0, le=64, description="Default: num_gpus of the job.")
    cpu: str | None = Field(None, pattern=r"^[0-9.]{1,8}m?$")
    memory: str | None = Field(None, pattern=r"^[0-9.]{1,12}(Ki|Mi|Gi|Ti)?$")


class Kubernetes(Launcher):
    name = "kubernetes"
    uses_this_machine = False
    options = KubernetesOptions

    def start(self, start: Start) -> str:
        """Apply the Job of this start: applying it twice changes nothing."""
        options = start.options
        assert isinstance(options, KubernetesOptions)
        document = manifest(start, options)
        ask(["kubectl", f"--namespace={options.namespace}", "apply", "--filename=-"], stdin=json.dumps(document))
        return document["metadata"]["name"]

    def find(self, folder: Path, options: BaseModel, handle: str) -> Found:
        assert isinstance(options, KubernetesOptions)
        if not handle:
            return Found("absent")
        answer = ask(
            ["kubectl", f"--namespace={options.namespace}", "get", "job", handle, "--output=json"], absent=_ABSENT
        )
        if answer is None:
            return Found("absent")
        try:
            status = json.loads(answer).get("status", {})
        except (ValueError, AttributeError):
            raise Problem(503, "kubectl get job gave no JSON", got=answer[:200], fix="check kubectl") from None
        if status.get("succeeded") or status.get("failed"):
            return Found("absent", "succeeded" if status.get("succeeded") else "failed")
        return Found("running") if status.get("active") and status.get("ready", 1) else Found("waiting")

    def stop(self, folder: Path, options: BaseModel, handle: str, *, force: bool) -> None:
        """Delete the Job: its pod gets SIGTERM and time for a checkpoint, with ``force`` none."""
        assert isinstance(options, KubernetesOptions)
        if not handle:
            return
        how = ["--grace-period=0", "--force"] if force else []
        command = ["kubectl", f"--namespace={options.namespace}", "delete", "job", handle]
        ask([*command, "--wait=false", "--cascade=foreground", *how], absent=_ABSENT)


KUBERNETES = Kubernetes()


def manifest(start: Start, options: KubernetesOptions) -> dict[str, Any]:
    name = f"{start.name}-{start.number}"
    labels = {"app.kubernetes.io/name": "penstock", "penstock/run": start.run}
    gpus = options.gpus if options.gpus is not None else start.num_gpus
    asked = {"nvidia.com/gpu": str(gpus) if gpus else None, "cpu": options.cpu, "memory": options.memory}
    limits = {key: value for key, value in asked.items() if value}
    container: dict[str, Any] = {
        "name": "penstock",
        "image": options.image,
        "command": ["python" if word == sys.executable else word for word in start.process],  # that of the image
        "resources": {"limits": limits, "requests": limits} if limits else {},
        "volumeMounts": [{"name": "runs", "mountPath": str(start.folder.parent)}],
    }
    if start.directory:
        container["workingDir"] = str(start.directory)
    if options.environment_secret:
        container["envFrom"] = [{"secretRef": {"name": options.environment_secret}}]
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_S,
        "containers": [container],
        "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": options.claim}}],
    }
    if options.service_account:
        pod["serviceAccountName"] = options.service_account
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {"backoffLimit": 0, "template": {"metadata": {"labels": labels}, "spec": pod}},
    }
