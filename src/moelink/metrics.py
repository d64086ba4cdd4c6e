"""Export the numbers of communicators to Prometheus: opt-in, and beside their calls.

:func:`serve` opens an endpoint, and a :class:`Collector` joins a registry that a program has. Both need
the extra ``moelink[metrics]``. A scrape reads what transports and kernels count (docs/metrics.md); a call does
nothing for it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

from moelink.communicator import Communicator
from moelink.config import EPConfig
from moelink.env import METRICS
from moelink.errors import ArgumentError, ConfigError, UnsupportedError
from moelink.lifetime import lanes_of
from moelink.ops.lanes import Lanes
from moelink.transports.counters import Counters

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

MOST_PEERS = 64
"""Peers with a label of their own. The ranks from this one on share the label "rest"."""

_LANE = ("communicator", "rank", "lane")


@dataclass(frozen=True)
class Metric:
    """One metric: its name in queries, its kind, its labels, and what it says."""

    name: str
    kind: Literal["counter", "gauge"]
    labels: tuple[str, ...]
    meaning: str

    def family(self) -> Any:
        """Return a family of prometheus_client without samples."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        family = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        return family(self.name, self.meaning, labels=self.labels)


METRICS_TABLE = (
    Metric("moelink_calls_total", "counter", (*_LANE, "phase"), "calls that are over, refused ones included"),
    Metric("moelink_sent_bytes_total", "counter", (*_LANE, "phase"), "bytes of rows and metadata sent to other ranks"),
    Metric("moelink_dropped_rows_total", "counter", _LANE, "rows that did not fit the output"),
    Metric("moelink_invalid_ids_total", "counter", _LANE, "expert ids out of range, which acted as -1"),
    Metric("moelink_failures_total", "counter", ("phase", "kind", "peer"), "errors that calls raised, by class"),
    Metric("moelink_recoveries_total", "counter", (), "communicators that went on as one of their survivors"),
    Metric("moelink_poisoned", "gauge", _LANE, "1 once an error has ended the communicator"),
    Metric("moelink_dispatch_tokens", "gauge", _LANE, "tokens of this rank in the latest dispatch"),
    Metric("moelink_dispatch_messages", "gauge", (*_LANE, "peer"), "tokens of that rank that came in the latest one"),
    Metric("moelink_dispatch_rows", "gauge", _LANE, "rows for this rank's experts in the latest dispatch"),
    Metric("moelink_expert_imbalance", "gauge", _LANE, "of these, those of the busiest expert over the experts' mean"),
    Metric("moelink_awaited", "gauge", (*_LANE, "phase", "peer"), "1 while that rank is missing in a call begun here"),
    Metric("moelink_workspace_bytes", "gauge", _LANE, "bytes of symmetric memory of this rank"),
    Metric("moelink_world_size", "gauge", _LANE, "ranks of the communicator"),
)
"""Every metric. Labels have few values: numbers of ranks, lanes and communicators, phases, and classes of errors."""


class Collector:
    """A collector for registries of prometheus_client, which reads communicators at each scrape.

    It keeps a communicator until that is closed. After :meth:`Communicator.recover` it reads the one of the survivors;
    its counters begin at 0 again, as after a restart. Failures and recoveries stay counted.

    Args:
        communicators: as for :meth:`add`.

    Raises:
        UnsupportedError: prometheus_client is not installed.
    """

    def __init__(self, *communicators: Communicator) -> None:
        if find_spec("prometheus_client") is None:
            raise UnsupportedError(
                "metrics: expected the package prometheus_client, got none; run pip install prometheus_client"
            )
        self._lock = Lock()
        self._open: list[Lanes | None] = []
        self._failures: Counter[tuple[str, str, int]] = Counter()
        self._recoveries = 0
        for ep in communicators:
            self.add(ep)

    def add(self, ep: Communicator) -> None:
        """Read ``ep`` and its lanes at each scrape from now on. Its label is the least number that no open one has.

        Raises:
            ArgumentError: it is no Communicator, as that of ``init_devices``.
            StateError: it is a lane other than lane 0.
        """
        lanes = _require_communicator(ep)
        lanes.counters()  # it allocates now, not in the first scrape
        with self._lock:
            self._follow()
            if None not in self._open:
                self._open.append(None)
            self._open[self._open.index(None)] = lanes

    def describe(self) -> Iterable[Family]:
        """Return all metrics without samples, by which a registry refuses a second collector."""
        return [each.family() for each in METRICS_TABLE]

    def collect(self) -> Iterable[Family]:
        """Return all metrics."""
        with self._lock:
            self._follow()
            failures = Counter(self._failures)
            families = {each.name: each.family() for each in METRICS_TABLE}
            for number, lanes in enumerate(self._open):
                if lanes is None:
                    continue
                session = lanes.contexts[0].session
                failures.update(dict(session.fate.failures.counts))
                for lane, counters in enumerate(lanes.counters()):
                    if counters is None:
                        continue
                    place = str(number), str(session.configs[0].rank), str(lane)
                    has_ended = session.fate.error is not None
                    for name, labels, value in _samples(counters, session.configs[0], has_ended):
                        families[name].add_metric([*place, *labels], value)
            by_label: Counter[tuple[str, str, str]] = Counter()
            for (phase, kind, peer), count in failures.items():
                by_label[phase, kind, _label(peer)] += count
            for labels, value in by_label.items():
                families["moelink_failures_total"].add_metric(labels, value)
            families["moelink_recoveries_total"].add_metric([], self._recoveries)
            return list(families.values())

    def _follow(self) -> None:
        """Go on with the survivors of communicators that have recovered, and forget those that have ended."""
        for number, lanes in enumerate(self._open):
            while lanes is not None and (lanes.successor is not None or lanes.has_ended):
                self._failures.update(dict(lanes.contexts[0].session.fate.failures.counts))
                self._recoveries += lanes.successor is not None
                lanes = lanes.successor
            self._open[number] = lanes


def _require_communicator(ep: Communicator) -> Lanes:
    """Return the lanes of ``ep``. Raises as :meth:`Collector.add`."""
    if not isinstance(ep, Communicator):
        raise ArgumentError("ep", "a Communicator, which is one rank of a process", type(ep).__name__)
    return lanes_of(ep)


def _samples(counters: Counters, config: EPConfig, has_ended: bool) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Return the samples of one lane: name, labels after those of the lane, value."""
    for phase, calls in counters.calls.items():
        yield "moelink_calls_total", (phase,), calls
        yield "moelink_sent_bytes_total", (phase,), counters.sent[phase]
    if counters.dropped is not None and counters.invalid is not None:
        yield "moelink_dropped_rows_total", (), counters.dropped
        yield "moelink_invalid_ids_total", (), counters.invalid
    yield "moelink_poisoned", (), has_ended or counters.poisoned
    yield "moelink_workspace_bytes", (), counters.workspace_bytes
    yield "moelink_world_size", (), config.world_size
    for phase, awaited in counters.awaited.items():
        for peer, value in _by_peer(awaited, config):
            yield "moelink_awaited", (phase, peer), value
    latest = counters.latest
    if latest is None:
        return
    yield "moelink_dispatch_tokens", (), latest.tokens
    for peer, value in _by_peer(latest.messages, config):
        yield "moelink_dispatch_messages", (peer,), value
    if latest.rows is not None:
        total = sum(latest.rows)
        yield "moelink_dispatch_rows", (), total
        yield "moelink_expert_imbalance", (), max(latest.rows) * len(latest.rows) / total if total else 1.0


def _by_peer(values: Iterable[int], config: EPConfig) -> Iterable[tuple[str, int]]:
    """Return the values by label of peer; one value alone is of this rank itself."""
    values = list(values)
    found: Counter[str] = Counter()
    for peer, value in enumerate(values) if len(values) > 1 else [(config.rank, values[0])]:
        found[_label(peer)] += value
    return found.items()


def _label(peer: int) -> str:
    return "none" if peer < 0 else str(peer) if peer < MOST_PEERS else "rest"


@dataclass(frozen=True)
class Endpoint:
    """An HTTP endpoint of this process for Prometheus, which :func:`serve` has opened.

    Attributes:
        collector: of its communicators; others join by ``add``.
        port: that it listens at.
        close: a function that closes it, and leaves communicators open.
    """

    collector: Collector
    port: int
    close: Callable[[], None]

    @classmethod
    def open(cls, host: str, port: int, rank: int) -> Endpoint:
        """Listen at the port of a rank, without a communicator so far. Raises as :func:`serve`."""
        collector = Collector()
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(collector)  # type: ignore[arg-type]
        try:
            server, thread = start_http_server(port and port + rank, host, registry)
        except (OSError, OverflowError, TypeError) as error:
            expected = f"a number to which rank {rank} may be added for a free port of {host}"
            raise ConfigError("port", expected, f"{port} ({error})") from error

        def close() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return cls(collector, server.server_port, close)


def serve(ep: Communicator, *, port: int = 9400, host: str = "127.0.0.1") -> Endpoint:
    """Serve the numbers of ``ep`` to Prometheus, from a thread of this process. Not collective.

    Args:
        ep: the communicator.
        port: of rank 0. Rank r listens at ``port + r``, so that each rank of a host has a port. 0: any free port.
        host: the address of an interface, or ``"0.0.0.0"`` for all. Each host that reaches it may read the numbers.

    Raises:
        ArgumentError, StateError: as :meth:`Collector.add`.
        ConfigError: the port is not free, or is no port.
        UnsupportedError: prometheus_client is not installed.

    Example:
        >>> import moelink
        >>> from urllib.request import urlopen
        >>> with moelink.init(num_experts=4, topk=2, hidden_size=8, max_tokens_per_rank=3) as ep:
        ...     endpoint = moelink.metrics.serve(ep, port=0)
        ...     text = urlopen(f"http://127.0.0.1:{endpoint.port}/metrics").read().decode()
        ...     endpoint.close()
        >>> [line for line in text.splitlines() if line.startswith("moelink_world_size")]
        ['moelink_world_size{communicator="0",lane="0",rank="0"} 1.0']
    """
    _require_communicator(ep)
    endpoint = Endpoint.open(host, port, ep.config.rank)
    endpoint.collector.add(ep)
    return endpoint


def endpoint_of_environment(rank: int) -> Endpoint | None:
    """Return the endpoint of this process that MOELINK_METRICS asks for, open, or None if the variable is not set.

    ``rank``: of the communicator that will join it. That of the process's first communicator decides the port.

    Raises:
        ConfigError: the value is neither a port nor HOST:PORT, or the port is not free.
        UnsupportedError: prometheus_client is not installed.
    """
    asked = METRICS.read()
    if not asked:
        return None
    host, _, port = asked.rpartition(":")
    if not port.isdecimal() or int(port) == 0:
        raise ConfigError(METRICS.name, "a port, or HOST:PORT", asked)
    opened = _opened_by(os.getpid())
    if asked not in opened:
        opened[asked] = Endpoint.open(host or "127.0.0.1", int(port), rank)
    return opened[asked]


@cache
def _opened_by(process: int) -> dict[str, Endpoint]:
    """Return the endpoints of a process, by value of MOELINK_METRICS."""
    return {}
