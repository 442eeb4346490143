"""What `docker compose up` does with the services: order, health, restarts, stop."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tests.rigs.compose.container import Container, Network
from tests.rigs.compose.interpret import Check, Service, built, foreign

_POLL_S = 0.1
_RESTART_S = 1.0


class Health:
    """The state that docker keeps of a container's health check."""

    def __init__(self, container: Container, check: Check, pool: ThreadPoolExecutor) -> None:
        self.state, self.output = "starting", ""
        self._container, self._check, self._pool = container, check, pool
        self._started = self._asked = time.monotonic()
        self._failures = 0
        self._running: Future[tuple[int, str]] | None = None

    def restarted(self) -> None:
        """Begin again: the container was started anew."""
        self.state, self._failures, self._running = "starting", 0, None
        self._started = self._asked = time.monotonic()

    def poll(self) -> None:
        """Take the answer of a check that has ended, or start the next one when it is due."""
        now = time.monotonic()
        if self._running is None:
            # docker asks every interval; a shorter one finds a start earlier and changes nothing else
            if now - self._asked >= (
                min(1.0, self._check.interval_s) if self.state == "starting" else self._check.interval_s
            ):
                self._running = self._pool.submit(self._container.run, self._check.test, self._check.timeout_s)
        elif self._running.done():
            code, self.output = self._running.result()
            self._running, self._asked = None, now
            if code == 0:
                self.state, self._failures = "healthy", 0
            elif self.state == "healthy" or now - self._started > self._check.start_period_s:
                self._failures += 1
                if self._failures >= self._check.retries and now - self._started > self._check.start_period_s:
                    self.state = "unhealthy"


class Stack:
    """All containers of some services. Use it as a context manager; `poll` it."""

    def __init__(
        self, services: Mapping[str, Service], *, files: Path, repository: Path, work: Path, subnet: str
    ) -> None:
        """``files`` is the folder of compose.yaml, ``repository`` the context of the images, ``work`` a new folder."""
        self.services = services
        self.containers: list[Container] = []
        self.health: dict[str, Health] = {}
        self._started: set[str] = set()
        self._down: dict[str, float] = {}  # name of a container that is to be started again, and since when
        self._pool = ThreadPoolExecutor(16, "health")
        self._network = Network(subnet)
        self._files, self._repository, self._work, self._subnet = files, repository, work, subnet
        self._hosts: dict[str, list[str]] = {}
        self._namespaces: dict[str, str] = {}

    def __enter__(self) -> Stack:
        self._network.__enter__()
        number = 2
        for service in self.services.values():
            for _ in range(service.replicas):
                self.containers.append(self.container(service, number))
                number += 1
        return self

    def __exit__(self, *_: object) -> None:
        stopping = [threading.Thread(target=container.stop) for container in reversed(self.containers)]
        for thread in stopping:
            thread.start()
        for thread in stopping:
            thread.join()
        self._pool.shutdown(cancel_futures=True)
        self._network.__exit__()

    def container(self, service: Service, number: int) -> Container:
        image = (
            built(self._repository / service.dockerfile, service.target)
            if service.dockerfile
            else foreign(service.image)
        )
        shared = service.shares_network_of
        if not shared:
            self._namespaces[service.name] = self._network.add(number)
            self._hosts.setdefault(service.name, []).append(f"{self._subnet}.{number}")
        container = Container(
            service, image, number=number, namespace=self._namespaces[shared or service.name], volumes=self._work / "volumes",
            files=self._files, work=self._work / f"{service.name}-{number}",
        )  # fmt: skip
        if not shared:  # docker's DNS knows a container by its host name too
            self._hosts[container.hostname] = [f"{self._subnet}.{number}"]
        if service.check is not None:
            self.health[container.name] = Health(container, service.check, self._pool)
        return container

    def start(self, container: Container) -> None:
        container.start(self._hosts)

    def of(self, service: str) -> list[Container]:
        return [one for one in self.containers if one.service.name == service]

    def poll(self) -> None:
        """Start what may start, look at health checks, restart what ended; raises RuntimeError when a start cannot succeed."""
        for service in self.services.values():
            if service.name not in self._started and all(self._is_met(*item) for item in service.depends_on.items()):
                self._started.add(service.name)
                for container in self.of(service.name):
                    print(f"{time.monotonic():.1f} start {container.name}", file=sys.stderr)
                    self.start(container)
        for container in self.containers:
            if container.service.name in self._started:
                self._poll(container)

    def wait(self, condition: Callable[[], object], what: str, deadline_s: float) -> None:
        """Poll until a condition holds; raises TimeoutError with every container's last lines."""
        until = time.monotonic() + deadline_s
        while not condition():
            if time.monotonic() > until:
                raise TimeoutError(f"no {what} within {deadline_s:g} s\n{self.report()}")
            self.poll()
            time.sleep(_POLL_S)

    def report(self) -> str:
        """Return the state and the last lines of every container."""
        return "\n".join(
            f"== {one.name}: code {one.code}, restarts {one.restarts}, "
            f"{self.health[one.name].state + ' ' + self.health[one.name].output[-500:] if one.name in self.health else 'no check'}\n{one.log_tail()}"
            for one in self.containers
        )

    def _is_met(self, other: str, condition: str) -> bool:
        found = self.of(other)
        if condition == "service_completed_successfully":
            if any(one.code not in (None, 0) and one.service.restart == "no" for one in found):
                raise RuntimeError(f"{other} failed\n{self.report()}")
            return all(one.code == 0 for one in found)
        if condition == "service_healthy":
            return other in self._started and all(self.health[one.name].state == "healthy" for one in found)
        return other in self._started

    def _poll(self, container: Container) -> None:
        code = container.code
        if code is None:
            if container.name in self.health:
                self.health[container.name].poll()
            return
        policy = container.service.restart
        again = policy in ("always", "unless-stopped") or (policy == "on-failure" and code != 0)
        if container.is_stopping or not again:
            return
        since = self._down.setdefault(container.name, time.monotonic())
        if time.monotonic() - since >= _RESTART_S:
            del self._down[container.name]
            container.codes.append(code)
            container.restarts += 1
            print(f"{time.monotonic():.1f} restart {container.name} after exit code {code}", file=sys.stderr)
            self.start(container)
            if container.name in self.health:
                self.health[container.name].restarted()
