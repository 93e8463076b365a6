"""A process with a local Ray cluster of several nodes: run by test_ray.py."""

import contextlib
import importlib
import os
import shutil
import tempfile

from helpers import children

# No usage statistics, no metrics, and a quick detection of lost nodes.
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "20000",
    "RAY_health_check_failure_threshold": "5",
}
# A loopback address: Ray would replace 127.0.0.1 by the machine's own address.
HERE = "127.0.0.2"
ALL = {"node_ip_address": HERE, "object_store_memory": 80 << 20}


class Commands:
    """The commands that the test sends."""

    def start(self):
        # A short path for Ray's sockets, whose names have at most 107 bytes.
        self._folder = tempfile.mkdtemp(prefix="ray-")
        # Ray reads these when it is imported.
        os.environ |= QUIET | {"RAY_TMPDIR": self._folder}
        self._ray = importlib.import_module("ray")
        kind = importlib.import_module("ray.cluster_utils").Cluster
        head = {"num_cpus": 0, "include_dashboard": False}
        self._cluster = kind(initialize_head=True, head_node_args=head | ALL)
        self._ray.init(
            self._cluster.address, namespace="agn_optax", log_to_driver=False
        )
        self._nodes = {}
        return {"address": self._cluster.address}

    def nodes(self, wanted):
        """Replace all nodes except the head by these."""
        for name in list(self._nodes):
            self.remove(name)
        for name, node in wanted.items():
            self.add(name, **node)

    def add(self, name, **node):
        self._nodes[name] = self._cluster.add_node(**node, **ALL)

    def remove(self, name):
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def where(self, actor):
        """Return the node and the process id of an actor; None if it does not run."""
        ray = self._ray
        try:
            node, _, pid = ray.get(ray.get_actor(actor).location.remote(), timeout=2)
        except (ValueError, ray.exceptions.RayError):
            return {"pid": None, "node": None}
        names = {each.node_id: name for name, each in self._nodes.items()}
        return {"pid": pid, "node": names.get(node)}

    def stop(self):
        with contextlib.suppress(AttributeError):  # `start` failed or was not called
            self._ray.shutdown()
            self._cluster.shutdown()
            shutil.rmtree(self._folder, ignore_errors=True)


if __name__ == "__main__":
    me = Commands()
    names = ["start", "nodes", "add", "remove", "where", "stop"]
    children.serve_commands({name: getattr(me, name) for name in names})
