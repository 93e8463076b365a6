"""Metrics of a monitored center for Prometheus.

Every number of the monitor's view is a metric, of the center or of each worker.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Names of metrics that are not those of the view. Names with `_total` are counters, all
# others gauges.
_NAMES = {
    "uptime": "uptime_seconds",
    "exchanges": "exchanges_total",
    "bytes_received": "received_bytes_total",
    "bytes_sent": "sent_bytes_total",
    "seen": "seen_seconds",
    "stalled": "stalled_seconds",
    "norm": "message_norm",
    "period": "period_steps",
    "dropped": "dropped_total",
    "rejected": "rejected_total",
}


def exposition(view: dict[str, Any]) -> bytes:
    """Return the metrics in Prometheus' text format.

    Args:
      view: the result of `Monitor.view`.
    """
    samples: defaultdict[str, list[str]] = defaultdict(list)

    def add(key: str, value: object, prefix: str = "", **labels: str) -> None:
        """Add a metric if its value is a number."""
        if isinstance(value, int | float):
            name = f"agn_optax_{prefix}{_NAMES.get(key, key)}"
            shown = ",".join(f'{k}="{_escaped(text)}"' for k, text in labels.items())
            samples[name].append(f"{name}{{{shown}}} {float(value)}")

    settings = {name: str(view[name]) for name in ("release", "rule", "mode")}
    add("center_info", 1, **settings)
    for key, value in view.items():
        add(key, value)
    add("degraded", bool(view["degraded"]))
    add("staleness_count", view["staleness"]["count"])
    add("staleness_sum", view["staleness"]["sum"])
    for limit, number in view["rejected"].items():
        add("rejected", number, by=limit)
    for kind, number in view["event_counts"].items():
        add("events_total", number, kind=kind)
    for worker in view["workers"]:
        if not worker["end_reason"]:
            for key, value in worker.items():
                add(key, value, "worker_", worker=worker["name"])
            for label, value in worker["reported"].items():
                add("worker_reported", value, worker=worker["name"], name=label)
    return "".join(
        f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}\n"
        + "".join(f"{sample}\n" for sample in lines)
        for name, lines in samples.items()
    ).encode()


def _escaped(text: str) -> str:
    """Return the value of a label as the format wants it."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
