"""Trace context through gRPC metadata: interceptors for servers and channels."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from slipstream import telemetry

_UNWATCHED = ("/grpc.health.", "/grpc.reflection.")


class TraceServerInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """A span for each call, within the caller's trace."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        method, metadata = handler_call_details.method, handler_call_details.invocation_metadata
        if handler is None or not telemetry.enabled() or method.startswith(_UNWATCHED):
            return handler
        if handler.unary_unary:
            inner = handler.unary_unary

            async def unary(request: Any, context: Any) -> Any:
                with _serve(method, metadata):
                    return await inner(request, context)

            return grpc.unary_unary_rpc_method_handler(
                unary, handler.request_deserializer, handler.response_serializer
            )
        if handler.unary_stream:
            inner_stream = handler.unary_stream

            async def stream(request: Any, context: Any) -> Any:
                # Not made current: a generator may be resumed and closed in other contexts.
                span = _start(method, metadata)
                try:
                    async for response in inner_stream(request, context):
                        yield response
                finally:
                    span.end()

            return grpc.unary_stream_rpc_method_handler(
                stream, handler.request_deserializer, handler.response_serializer
            )
        return handler


@contextmanager
def _serve(method: str, metadata: Any) -> Iterator[Span]:
    with telemetry.tracer().start_as_current_span(
        method.lstrip("/"),
        context=telemetry.extract(dict(metadata or ())),
        kind=SpanKind.SERVER,
        attributes=_attributes(method),
    ) as span:
        yield span


def _start(method: str, metadata: Any) -> Span:
    context = telemetry.extract(dict(metadata or ()))
    return telemetry.tracer().start_span(
        method.lstrip("/"), context=context, kind=SpanKind.SERVER, attributes=_attributes(method)
    )


class TraceUnaryInterceptor(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    """A span for each unary call, named in the metadata."""

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        method = _text(client_call_details.method)
        if not telemetry.enabled() or method.startswith(_UNWATCHED):
            return await continuation(client_call_details, request)
        with telemetry.tracer().start_as_current_span(
            method.lstrip("/"), kind=SpanKind.CLIENT, attributes=_attributes(method)
        ) as span:
            call = await continuation(_with_trace(client_call_details), request)
            try:
                code = await call.code()
            except asyncio.CancelledError:
                call.cancel()
                raise
            if code is not grpc.StatusCode.OK:
                span.set_status(Status(StatusCode.ERROR, code.name))
        return call


class TraceStreamInterceptor(grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[misc]
    """Names the current span in the metadata of a call with a response stream."""

    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(_with_trace(client_call_details), request)


def client_interceptors() -> list[Any]:
    """Interceptors for a new channel; none without telemetry, so that calls stay as cheap as they are."""
    return [TraceUnaryInterceptor(), TraceStreamInterceptor()] if telemetry.enabled() else []


def server_interceptors() -> list[Any]:
    """Interceptors for a new server; none without telemetry."""
    return [TraceServerInterceptor()] if telemetry.enabled() else []


def _with_trace(details: Any) -> Any:
    metadata = grpc.aio.Metadata(*(details.metadata or ()), *telemetry.inject().items())
    return details._replace(metadata=metadata)


def _attributes(method: str) -> dict[str, str]:
    service, _, name = method.lstrip("/").partition("/")
    return {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}


def _text(method: str | bytes) -> str:
    return method.decode() if isinstance(method, bytes) else method
