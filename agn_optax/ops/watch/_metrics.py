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
    ("refused_total", "refused", "Its messages that were rejected"),
    ("received_bytes_total", "bytes_received", "Bytes of its received messages"),
    ("sent_bytes_total", "bytes_sent", "Bytes of the answers sent to it"),
]


def exposition(view: dict[str, Any]) -> bytes:
    """Return the metrics in Prometheus' text format.

    Args:
      view: the result of `Monitor.view`.
    """
    from prometheus_client import (  # noqa: PLC0415 only with an extra
        CollectorRegistry,
        generate_latest,
    )
    from prometheus_client.registry import Collector  # noqa: PLC0415

    class Seen(Collector):
        def collect(self) -> Iterable[Any]:
            return _families(view)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Seen())
    return generate_latest(registry)


def _families(view: dict[str, Any]) -> Iterator[Any]:
    from prometheus_client.core import (  # noqa: PLC0415
        GaugeMetricFamily,
        HistogramMetricFamily,
        InfoMetricFamily,
    )

    info = InfoMetricFamily("agn_optax_center", "Settings of the center")
    about = {name: view[name] for name in ("release", "rule", "mode", "parent")}
    info.add_metric([], about)
    yield info
    for name, key, said in _CENTER:
        yield _family(f"agn_optax_{name}", said, [], [([], view[key])])
    degraded = float(bool(view["degraded"]))
    said = "1 if less is on disk than was asked for, or the parent is lost, else 0"
    yield GaugeMetricFamily("agn_optax_degraded", said, value=degraded)
    said = "Rejected messages, by the message limit"
    rows = [([by], count) for by, count in sorted(view["refused"].items())]
    yield _family("agn_optax_refused_total", said, ["by"], rows)
    said = "Events, by kind"
    rows = [([kind], count) for kind, count in sorted(view["event_counts"].items())]
    yield _family("agn_optax_events_total", said, ["kind"], rows)

    staleness = HistogramMetricFamily(
        "agn_optax_staleness", "Staleness of applied messages, in center updates"
    )
    staleness.add_metric([], _buckets(view["staleness"]), view["staleness"]["sum"])
    yield staleness

    there = [worker for worker in view["workers"] if not worker["gone"]]
    for name, key, said in _WORKER:
        rows = [([worker["name"]], worker[key]) for worker in there]
        yield _family(f"agn_optax_worker_{name}", said, ["worker"], rows)
    said = "Last numbers that a worker reported, by name"
    rows = [
        ([worker["name"], name], value)
        for worker in there
        for name, value in worker["reported"].items()
    ]
    yield _family("agn_optax_worker_reported", said, ["worker", "name"], rows)


def _family(
    name: str, said: str, labels: list[str], rows: list[tuple[list[str], Any]]
) -> Any:
    from prometheus_client.core import (  # noqa: PLC0415
        CounterMetricFamily,
        GaugeMetricFamily,
    )

    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(name, said, labels=labels)
    for values, number in rows:
        if number is not None:
            family.add_metric(values, float(number))
    return family


def _buckets(staleness: dict[str, Any]) -> list[tuple[str, float]]:
    """Return cumulative counts; their bounds are also bounds of the view's bins."""
    bins = staleness["bins"]
    bounds = [(1 << n) - 1 for n in range(11)]
    return [
        *(
            (str(float(most)), sum(b["count"] for b in bins if b["to"] <= most))
            for most in bounds
        ),
        ("+Inf", staleness["count"]),
    ]
