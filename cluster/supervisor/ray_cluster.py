"""Starts or joins Ray, and reserves room for the processes that have to be there from the start to the end.

`environment.prepare_ray` must have been called before this module is imported: Ray reads the environment then.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
import ray.exceptions
from ray._private.state import available_resources_per_node
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

_ray: Any = ray  # Any: many of Ray's functions are untyped

Tell = Callable[[str], None]
"""Shows one line to whoever started the server."""

OBJECT_STORE_BYTES = 80 * 2**20
"""The least that Ray takes. No request data goes through it."""

_RAY_FOLDER = str(Path(ray.__file__).parent)
_TELL_EVERY_S = 5.0
_PROBE_S = 5.0


class ClusterError(RuntimeError):
    """Ray cannot be started or joined, or has no room; the message says what was asked and what there is."""


class RayCluster:
    """A connection to Ray.

    Args:
        address: "local" for a Ray of our own, "auto" or host:port to join one.
        directory: for the session of a Ray of our own.
        num_cpus, resources: what a Ray of our own offers.
    Raises:
        ClusterError: it does not start, or there is none to join.
    """

    def __init__(self, address: str, directory: Path, num_cpus: int, resources: dict[str, float]) -> None:
        self.is_own = address == "local"
        if ":" in address:
            _check_listens(address)
        options: dict[str, Any] = {"address": address}  # Any: keyword arguments of ray.init
        if self.is_own:
            options |= {
                "num_cpus": num_cpus,
                "resources": resources,
                "object_store_memory": OBJECT_STORE_BYTES,
                "include_dashboard": False,
                "_temp_dir": str(directory / "ray"),
            }
        # Ray's processes inherit the mask: a SIGTERM for the whole process group, as systemd and `timeout` send it, is
        # for this process, which ends them in order. Actors unblock it; Ray ends its own by SIGKILL when need be.
        # Ray's own handler aborts: ours is put back before a SIGTERM that came meanwhile is let in.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        handler = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(namespace=directory.name, log_to_driver=True, logging_level=logging.ERROR, **options)
        except (ConnectionError, OSError, ValueError, RuntimeError) as error:
            what = "start Ray" if self.is_own else f"join Ray at {address} (cluster.ray_address)"
            hint = "" if self.is_own else "; if it asks for a token, set RAY_AUTH_MODE=token"
            raise ClusterError(f"cannot {what}: {' '.join(str(error).split())}{hint}") from error
        finally:
            signal.signal(signal.SIGTERM, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._group: Any = None  # Any: Ray's placement group is untyped
        self._node_id = ray.get_runtime_context().get_node_id()
        self.node, self.address = self._this_node()
        self.node_resource = f"node:{self.address}"  # only this one has it

    def _this_node(self) -> tuple[str, str]:
        """Host name and address of this node."""
        for node in _ray.nodes():
            if node["NodeID"] == self._node_id:
                return node["NodeManagerHostname"], node["NodeManagerAddress"]
        raise ClusterError("this machine is no node of the Ray cluster; run `ray start --address=...` on it first")

    @property
    def is_alive(self) -> bool:
        """Whether a Ray of our own still runs; one that was joined counts as alive. Calls into a dead one hang."""
        if not self.is_own:
            return True
        names = {child.name() for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE}
        return names >= {"gcs_server", "raylet"}

    def missing(self, wanted: dict[str, float], placement: str) -> str:
        """What there is not enough of for one process: "needs 1 CPU, 0 free"; empty when a node has room for it.

        Args:
            wanted: resources of the process.
            placement: as in the configuration; with STRICT_PACK this node counts alone.
        """
        nodes = available_resources_per_node()  # Ray's public numbers are of all nodes together
        if placement == "STRICT_PACK":
            return lacking(wanted, [nodes.get(self._node_id, {})])
        return lacking(wanted, list(nodes.values()))

    def reserve(
        self, bundles: Sequence[dict[str, float]], why: str, timeout_s: float, tell: Tell, check: Callable[[], None]
    ) -> None:
        """Reserves room for one process per bundle, all on this node, whose memory and sockets they share.

        Args:
            why: the keys of the configuration that ask for it.
            tell: told every few seconds what is waited for.
            check: called several times a second; may raise to give up.
        Raises:
            ClusterError: there was no room in time; nothing stays reserved.
        """
        here = {self.node_resource: 0.001}
        self._group = placement_group([{**bundle, **here} for bundle in bundles], strategy="STRICT_PACK")
        began = time.monotonic()
        told = began - _TELL_EVERY_S + 1.0
        while not self._group.wait(timeout_seconds=0.3):
            waited_s = time.monotonic() - began
            shortage = self._shortage(bundles, why)
            if waited_s > timeout_s:
                self.release()
                raise ClusterError(f"gave up after {waited_s:.0f} s (cluster.startup_timeout_s): {shortage}")
            if time.monotonic() - told >= _TELL_EVERY_S:
                told = time.monotonic()
                tell(f"waiting for {shortage}, {waited_s:.0f} s")
            try:
                check()
            except BaseException:
                self.release()
                raise

    def _shortage(self, bundles: Sequence[dict[str, float]], why: str) -> str:
        names = sorted({name for bundle in bundles for name in bundle})
        [total] = (node["Resources"] for node in _ray.nodes() if node["NodeID"] == self._node_id)
        free = available_resources_per_node().get(self._node_id, {})
        wanted = {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}
        parts = [f"{wanted[n]:g} {n}: {free.get(n, 0.0):g} of {total.get(n, 0.0):g} free" for n in names]
        return f"{', '.join(parts)} on node {self.node} ({why})"

    def bundle(self, index: int) -> Any:  # Any: Ray's scheduling strategies have no common type
        """The scheduling strategy that puts a process into its reserved place."""
        assert self._group is not None, "nothing is reserved"
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)

    def strategy(self, placement: str) -> Any:  # Any: as above
        """The scheduling strategy of a process without a reserved place; `placement` as in the configuration."""
        if placement == "SPREAD":
            return "SPREAD"
        if placement == "PACK":
            # Ray's default goes elsewhere as soon as half of this node is taken. There is no way to say it without the
            # underscored argument.
            return NodeAffinitySchedulingStrategy(self._node_id, soft=True, _spill_on_unavailable=True)
        return "DEFAULT"  # with this node's resource, which leaves no choice

    def release(self) -> None:
        """Gives back what was reserved; processes that run there die."""
        if self._group is not None and self.is_alive:
            remove_placement_group(self._group)
            self._group = None

    def close(self) -> None:
        """Gives back what was reserved and leaves the cluster; a Ray of our own ends."""
        self.release()
        if self.is_own:
            _kill_helpers()
        ray.shutdown()


def lacking(wanted: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> str:
    """What one process would need, on the node that lacks the least kinds of it; empty when one of them has room.

    Args:
        wanted: resources of the process, by name.
        nodes: what is free on each.
    """
    per_node: list[list[str]] = [
        [
            f"needs {amount:g} {name}, {free.get(name, 0.0):g} free"
            for name, amount in wanted.items()
            if amount > free.get(name, 0.0)
        ]
        for free in nodes or [{}]
    ]
    fewest = min(per_node, key=len)
    return "; ".join(fewest)


def _kill_helpers() -> None:
    """Ends log monitor, autoscaler and dashboard. Ray gives each a second for a SIGTERM, which they have blocked."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(argument.startswith(_RAY_FOLDER) and argument.endswith(".py") for argument in child.cmdline()):
                child.kill()


def _check_listens(address: str) -> None:
    """Raises ClusterError when nobody listens there: Ray itself would go on trying for many minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _PROBE_S).close()
    except OSError as error:
        raise ClusterError(f"cannot join Ray at {address} (cluster.ray_address): {error.strerror or error}") from error
