"""Metrics of a monitored center for Prometheus; needs agn_optax[metrics].

Every number of the monitor's view is a metric, of the center or of each worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    "rate": "rate_bytes_per_second",
    "period": "period_steps",
    "dropped": "dropped_total",
    "rejected": "rejected_total",
    "steps_made": "steps_made_total",
    "steps_delivered": "steps_delivered_total",
    "weight_made": "weight_made_total",
    "weight_delivered": "weight_delivered_total",
}


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

    def family(name: str, rows: Iterable[Any], *labels: str) -> Any:
        """Return a metric; a row has label values and a number, or None to skip it."""
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        text = "A number of the center's state.json, see docs/page.md"
        metric = kind(f"agn_optax_{name}", text, labels=labels)
        for *values, number in rows:
            if number is not None:
                metric.add_metric(values, float(number))
        return metric

    info = InfoMetricFamily("agn_optax_center", "Settings of the center")
    settings = ("release", "rule", "mode")
    info.add_metric([], {name: view[name] for name in settings})
    yield info
    for key, value in view.items():
        if isinstance(value, int | float):
            yield family(_NAMES.get(key, key), [(value,)])
    yield family("degraded", [(bool(view["degraded"]),)])
    notices = [(x["check"], x["worker"], 1) for x in view["notices"]]
    yield family("notice", notices, "check", "worker")
    yield family("rejected_total", view["rejected"].items(), "by")
    yield family("events_total", view["event_counts"].items(), "kind")

    staleness = HistogramMetricFamily(
        "agn_optax_staleness", "Staleness of applied messages, in center updates"
    )
    staleness.add_metric([], _buckets(view["staleness"]), view["staleness"]["sum"])
    yield staleness

    workers = [worker for worker in view["workers"] if not worker["end_reason"]]
    rows: dict[str, list[Any]] = {}
    for worker in workers:
        for key, value in worker.items():
            if isinstance(value, int | float):
                rows.setdefault(key, []).append((worker["name"], value))
    for key, numbers in rows.items():
        yield family(f"worker_{_NAMES.get(key, key)}", numbers, "worker")
    reported = [
        (worker["name"], name, value)
        for worker in workers
        for name, value in worker["reported"].items()
    ]
    yield family("worker_reported", reported, "worker", "name")


def _buckets(staleness: dict[str, Any]) -> list[tuple[str, float]]:
    """Return cumulative counts; their bounds are also bounds of the view's bins."""
    bins = staleness["bins"]
    counts = [
        (str(float(bound)), sum(b["count"] for b in bins if b["to"] <= bound))
        for bound in [(1 << n) - 1 for n in range(11)]
    ]
    return [*counts, ("+Inf", staleness["count"])]
