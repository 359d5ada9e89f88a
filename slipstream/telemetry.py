"""Traces and metrics through OpenTelemetry, when OTEL_EXPORTER_OTLP_ENDPOINT is set.

Without it the SDK is not even imported, and tracers and meters are the API's, which do nothing. All other
`OTEL_*` variables of the SDK and of the OTLP exporter work as documented there.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import metrics, trace
from opentelemetry.trace import Link, Span, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"

_SHUTDOWN_MS = 3000
_W3C = TraceContextTextMapPropagator()


class _State:
    """What this process sends telemetry with; the API's do-nothing providers outside a session."""

    service = "slipstream"
    tracers: trace.TracerProvider = trace.NoOpTracerProvider()
    meters: metrics.MeterProvider = metrics.NoOpMeterProvider()
    enabled = False


@contextlib.contextmanager
def session(name: str) -> Iterator[None]:
    """Names this process, and sends its spans and metrics until the context ends.

    Args:
        name: the service, e.g. `trainer`; becomes `service.name=slipstream-trainer`.
    """
    before, _State.service = _State.service, name
    try:
        with _export(name) if os.environ.get(ENDPOINT) else contextlib.nullcontext():
            yield
    finally:
        _State.service = before


@contextlib.contextmanager
def _export(name: str) -> Iterator[None]:
    tracers, meters = _providers(name)
    _State.tracers, _State.meters, _State.enabled = tracers, meters, True
    try:
        yield
    finally:
        _State.tracers, _State.meters = trace.NoOpTracerProvider(), metrics.NoOpMeterProvider()
        _State.enabled = False
        # A collector that is away must not hold up the end of the process.
        tracers.force_flush(_SHUTDOWN_MS)
        tracers.shutdown()
        meters.shutdown(timeout_millis=_SHUTDOWN_MS)


def _providers(name: str) -> tuple[Any, Any]:
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": f"slipstream-{name}", "service.namespace": "slipstream"})
    tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
    tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=3)))
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(timeout=3))
    return tracers, MeterProvider([reader], resource=resource, shutdown_on_exit=False)


def enabled() -> bool:
    """Whether this process sends telemetry."""
    return _State.enabled


def service_name() -> str:
    """Name given to `session`."""
    return _State.service


def tracer() -> trace.Tracer:
    """Source of spans. Ask for it when a span begins, not at import: it changes with the session."""
    return _State.tracers.get_tracer("slipstream")


def meter() -> metrics.Meter:
    """Source of instruments. Ask for it within the session, for example in a service's constructor."""
    return _State.meters.get_meter("slipstream")


def inject() -> dict[str, str]:
    """W3C headers (`traceparent`, `tracestate`) of the current span; empty when there is none."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier)
    return carrier


def extract(carrier: Mapping[str, str | bytes]) -> otel_context.Context:
    """Context of the span that headers or gRPC metadata name; an empty one when they name none."""
    texts = {
        key: value.decode("ascii", "replace") if isinstance(value, bytes) else value
        for key, value in carrier.items()
        if key in _W3C.fields
    }
    return _W3C.extract(texts, context=otel_context.Context())


@contextlib.contextmanager
def produce(topic: str, event_id: str, key: str) -> Iterator[Span]:
    """Span of sending one event."""
    attributes = _messaging(topic, "send") | {
        "messaging.message.id": event_id,
        "messaging.kafka.message.key": key,
    }
    with tracer().start_as_current_span(
        f"send {topic}", kind=SpanKind.PRODUCER, attributes=attributes
    ) as span:
        yield span


@contextlib.contextmanager
def consume(topic: str, headers: Mapping[str, bytes]) -> Iterator[Span]:
    """Span of handling one event: part of its producer's trace, so that a group is one trace."""
    parent = extract(headers)
    attributes = _messaging(topic, "process") | {
        "messaging.message.id": headers.get("ce_id", b"").decode("ascii", "replace")
    }
    with tracer().start_as_current_span(
        f"process {topic}",
        context=parent,
        kind=SpanKind.CONSUMER,
        attributes=attributes,
        links=_links([headers]),
    ) as span:
        yield span


@contextlib.contextmanager
def consume_batch(name: str, headers: Iterable[Mapping[str, bytes]]) -> Iterator[Span]:
    """Span of handling many events at once, with a link to each event's producer."""
    links = _links(headers) if enabled() else []
    with tracer().start_as_current_span(name, kind=SpanKind.CONSUMER, links=links) as span:
        yield span


def _links(headers: Iterable[Mapping[str, bytes]]) -> list[Link]:
    contexts = (trace.get_current_span(extract(each)).get_span_context() for each in headers)
    return [Link(context) for context in contexts if context.is_valid]


def _messaging(topic: str, operation: str) -> dict[str, str]:
    return {
        "messaging.system": "kafka",
        "messaging.destination.name": topic,
        "messaging.operation.type": operation,
    }
