"""Metrics of a monitored center for Prometheus; needs agn_optax[metrics]."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Metrics of the center: name, key of the view, help text. Names with `_total` are
# counters, all others gauges.
_CENTER = [
    ("version", "version", "Exchanges that have moved the center"),
    ("uptime_seconds", "uptime", "Seconds since the service was started"),
    ("parameters", "parameters", "Number of parameters of the center"),
    ("parameter_bytes", "parameter_bytes", "Bytes of these parameters"),
    ("exchanges_total", "exchanges", "Messages that were applied"),
    ("received_bytes_total", "bytes_received", "Bytes of received messages"),
    ("sent_bytes_total", "bytes_sent", "Bytes of sent answers"),
]
_WORKER = [
    ("connected", "connected", "1 if the worker is connected, else 0"),
    ("seen_seconds", "seen", "Seconds since the worker was last seen"),
    ("stalled_seconds", "stalled", "Seconds since its last exchange, if it stalled"),
    ("staleness", "staleness", "Staleness of its last message, in center updates"),
    ("message_norm", "norm", "Global norm of its last message"),
    ("period_steps", "period", "Local steps of its last round"),
    ("exchanges_total", "exchanges", "Its messages that were applied"),
    ("steps_total", "steps", "Local steps of its messages"),
    ("dropped_total", "dropped", "Its messages that were dropped"),
    ("rejected_total", "rejected", "Its messages that were rejected"),
    ("received_bytes_total", "bytes_received", "Bytes of its received messages"),
    ("sent_bytes_total", "bytes_sent", "Bytes of the answers sent to it"),
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
        """Return a metric; a row has label values and a number, and None skips it."""
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        metric = kind(f"agn_optax_{name}", text, labels=labels)
        for *values, number in rows:
            if number is not None:
                metric.add_metric(values, float(number))
        return metric

    info = InfoMetricFamily("agn_optax_center", "Settings of the center")
    settings = ("release", "rule", "mode", "parent")
    info.add_metric([], {name: view[name] for name in settings})
    yield info
    for name, key, text in _CENTER:
        yield family(name, text, [(view[key],)])
    text = "1 if less is on disk than was asked for, or if the parent is lost; else 0"
    yield family("degraded", text, [(bool(view["degraded"]),)])
    text = "Rejected messages, by the message limit"
    yield family("rejected_total", text, sorted(view["rejected"].items()), "by")
    text = "Events, by kind"
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
    text = "Last numbers that a worker reported, by name"
    yield family("worker_reported", text, reported, "worker", "name")


def _buckets(staleness: dict[str, Any]) -> list[tuple[str, float]]:
    """Return cumulative counts; their bounds are also bounds of the view's bins."""
    bins = staleness["bins"]
    counts = [
        (str(float(bound)), sum(b["count"] for b in bins if b["to"] <= bound))
        for bound in [(1 << n) - 1 for n in range(11)]
    ]
    return [*counts, ("+Inf", staleness["count"])]
