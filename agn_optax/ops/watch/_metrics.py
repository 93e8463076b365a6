"""Metrics of a monitored center for Prometheus; needs agn_optax[metrics]."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Metrics of the center: name, key of the view, help text. Names with `_total` are
# counters, all others gauges.
_CENTER = [
    ("version", "version", "Number of updates of the center"),
    ("uptime_seconds", "uptime", "Seconds since the service was started"),
    ("parameters", "parameters", "Number of parameters of the center"),
    ("parameter_bytes", "parameter_bytes", "Bytes of the center's parameters"),
    ("exchanges_total", "exchanges", "Messages that the center has applied"),
    ("received_bytes_total", "bytes_received", "Bytes of messages from workers"),
    ("sent_bytes_total", "bytes_sent", "Bytes of answers to workers"),
]
_WORKER = [
    ("connected", "connected", "1 if the worker is connected, else 0"),
    ("seen_seconds", "seen", "Seconds since the worker's last message or heartbeat"),
    (
        "stalled_seconds",
        "stalled",
        (
            "Seconds since the last exchange of a connected worker that does not wait; "
            "absent unless more than 10 s and twice its longest recent round"
        ),
    ),
    (
        "staleness",
        "staleness",
        "Staleness of the worker's last message, in center updates",
    ),
    ("message_norm", "norm", "Global norm of the worker's last message"),
    ("period_steps", "period", "Local steps of the worker's last round"),
    ("exchanges_total", "exchanges", "Messages of the worker that were applied"),
    (
        "steps_total",
        "steps",
        "Local steps in messages of the worker, even dropped and rejected ones",
    ),
    ("dropped_total", "dropped", "Messages of the worker that were dropped as too old"),
    ("rejected_total", "rejected", "Messages of the worker that were rejected"),
    ("received_bytes_total", "bytes_received", "Bytes of messages from the worker"),
    ("sent_bytes_total", "bytes_sent", "Bytes of answers to the worker"),
]


def exposition(view: dict[str, Any]) -> bytes:
    """Return the metrics in Prometheus' text format.

    Args:
      view: the result of `Monitor.view`.
    """
    from prometheus_client import generate_latest  # noqa: PLC0415 only with an extra
    from prometheus_client.registry import Collector  # noqa: PLC0415

    class ViewCollector(Collector):
        def collect(self) -> Iterable[Any]:
            return _families(view)

    return generate_latest(ViewCollector())


def _families(view: dict[str, Any]) -> Iterator[Any]:
    from prometheus_client.core import (  # noqa: PLC0415
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        InfoMetricFamily,
    )

    def family(name: str, text: str, rows: Iterable[Any], *labels: str) -> Any:
        """Return a metric; a row has label values and a number, or None to skip it."""
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        metric = kind(f"agn_optax_{name}", text, labels=labels)
        for *values, number in rows:
            if number is not None:
                metric.add_metric(values, float(number))
        return metric

    info = InfoMetricFamily("agn_optax_center", "Settings of the center")
    settings = ("release", "rule", "mode")
    info.add_metric([], {name: view[name] for name in settings})
    yield info
    for name, key, text in _CENTER:
        yield family(name, text, [(view[key],)])
    text = "1 if updates are missing on disk, else 0"
    yield family("degraded", text, [(bool(view["degraded"]),)])
    text = "Rejected messages, by the exceeded limit"
    yield family("rejected_total", text, sorted(view["rejected"].items()), "by")
    text = "Events of the center and its workers, by kind"
    yield family("events_total", text, sorted(view["event_counts"].items()), "kind")

    staleness = HistogramMetricFamily(
        "agn_optax_staleness", "Staleness of applied messages, in center updates"
    )
    staleness.add_metric([], _buckets(view["staleness"]), view["staleness"]["sum"])
    yield staleness

    workers = [worker for worker in view["workers"] if not worker["end_reason"]]
    for name, key, text in _WORKER:
        rows = [(worker["name"], worker[key]) for worker in workers]
        yield family(f"worker_{name}", text, rows, "worker")
    reported = [
        (worker["name"], name, value)
        for worker in workers
        for name, value in worker["reported"].items()
    ]
    text = "Last value of each number that the worker reported, by name"
    yield family("worker_reported", text, reported, "worker", "name")


def _buckets(staleness: dict[str, Any]) -> list[tuple[str, float]]:
    """Return cumulative counts; their bounds are also bounds of the view's bins."""
    bins = staleness["bins"]
    counts = [
        (str(float(bound)), sum(b["count"] for b in bins if b["to"] <= bound))
        for bound in [(1 << n) - 1 for n in range(11)]
    ]
    return [*counts, ("+Inf", staleness["count"])]
