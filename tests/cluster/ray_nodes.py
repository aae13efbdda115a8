"""Nodes of a Ray that others than Airside have started, all of them on this machine, each at a loopback address."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.cluster.up_server import PATIENCE_S, START_S, alive
from tests.real_processes import free_port, wait_until

_RAY = Path(sys.executable).with_name("ray")
NOTHING: Mapping[str, float] = {}

_COMMON = ("--object-store-memory=83886080", "--block")


class RayNode:
    """`ray start`, whose processes are its children.

    Args:
        folder: for its sockets and logs.
        arguments: beside those that are the same for all.
    """

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        self._log = folder / "start.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(_RAY), "start", f"--temp-dir={folder}", *arguments, *_COMMON],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "RAY_AUTH_MODE": "disabled"},  # whatever tokens this user has
                start_new_session=True,
            )

    def wait_joined(self) -> None:
        """Until it is a node of its cluster."""

        def has_joined() -> bool:
            assert self.is_alive, self._log.read_text()
            return "Ray runtime started" in self._log.read_text()

        wait_until(has_joined, START_S, "the node has joined")

    @property
    def is_alive(self) -> bool:
        """Whether `ray start` still watches over its processes."""
        return self._process.poll() is None

    def processes(self) -> list[psutil.Process]:
        """Its own, and those of all that it runs."""
        own = psutil.Process(self._process.pid)
        return [own, *own.children(recursive=True)]

    def stop(self) -> None:
        """In order: it ends its processes itself."""
        self._process.terminate()
        try:
            self._process.wait(PATIENCE_S)
        finally:
            self.kill()

    def suspend(self) -> None:
        """As if its cable had been pulled: nothing is heard of any process, and no connection ends."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.suspend()

    def kill(self) -> None:
        """Its processes and their connections end at once, suspended or not."""
        if not self.is_alive:
            return
        processes = self.processes()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(PATIENCE_S)
        wait_until(lambda: alive(processes) == [], PATIENCE_S, "its processes are gone")


@contextmanager
def head_node(num_cpus: int, host: str = "127.0.0.1", resources: Mapping[str, float] = NOTHING) -> Iterator[str]:
    """The node where a cluster begins; its address."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        where = [f"--node-ip-address={host}", f"--port={port}", "--include-dashboard=false"]
        has = [f"--num-cpus={num_cpus}", f"--resources={json.dumps(dict(resources))}"]
        node = RayNode(Path(folder), ["--head", *where, *has])
        try:
            node.wait_joined()
            yield f"{host}:{port}"
            assert node.is_alive, "Ray is gone"
        finally:
            node.stop()


@contextmanager
def further_node(address: str, host: str, name: str, resources: Mapping[str, float]) -> Iterator[RayNode]:
    """A node of the cluster at this address, with resources of its own and no CPUs. It is killed at the end."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        where = [f"--address={address}", f"--node-ip-address={host}", f"--node-name={name}"]
        node = RayNode(Path(folder), [*where, "--num-cpus=0", f"--resources={json.dumps(dict(resources))}"])
        try:
            node.wait_joined()
            yield node
        finally:
            node.kill()
