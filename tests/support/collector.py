"""An OpenTelemetry collector in the test's process: the real OTLP service over gRPC."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as traces
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector(
    traces.TraceServiceServicer,
    metrics.MetricsServiceServicer,
):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.spans: list[Span] = []
        self.services: set[str] = set()
        self.metrics: set[str] = set()

    def Export(self, request: Any, context: Any) -> Any:
        """Both services call their one method so."""
        if isinstance(request, metrics_service_pb2.ExportMetricsServiceRequest):
            for scope in (s for r in request.resource_metrics for s in r.scope_metrics):
                self.metrics |= {metric.name for metric in scope.metrics}
            return metrics_service_pb2.ExportMetricsServiceResponse()
        for resource in request.resource_spans:
            attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
            self.services.add(attributes["service.name"])
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> Span:
        """The one span of this name."""
        (span,) = [span for span in self.spans if span.name == name]
        return span


@contextmanager
def collecting() -> Iterator[Collector]:
    """Runs a collector on a free port."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    traces.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    metrics.add_MetricsServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()
