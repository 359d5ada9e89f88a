"""gRPC, set up once: limits, keepalive, retries, and the mapping between our errors and status codes."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from slipstream import errors, rpc_telemetry

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

_log = logging.getLogger(__name__)

_CODES: tuple[tuple[type[errors.SlipstreamError], grpc.StatusCode], ...] = (
    (errors.FencedError, grpc.StatusCode.ABORTED),
    (errors.ConflictError, grpc.StatusCode.ALREADY_EXISTS),
    (errors.StoreFullError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.RetryableError, grpc.StatusCode.UNAVAILABLE),
    (errors.NotFoundError, grpc.StatusCode.NOT_FOUND),
    (errors.IntegrityError, grpc.StatusCode.DATA_LOSS),
    (errors.ConfigError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.SlipstreamError, grpc.StatusCode.FAILED_PRECONDITION),
)
_ERRORS: dict[grpc.StatusCode, type[errors.SlipstreamError]] = {
    grpc.StatusCode.ABORTED: errors.FencedError,
    grpc.StatusCode.ALREADY_EXISTS: errors.ConflictError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.StoreFullError,
    grpc.StatusCode.UNAVAILABLE: errors.RetryableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.RetryableError,
    grpc.StatusCode.NOT_FOUND: errors.NotFoundError,
    grpc.StatusCode.DATA_LOSS: errors.IntegrityError,
    grpc.StatusCode.INVALID_ARGUMENT: errors.ConfigError,
}
_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
]
_LIMITS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
_SERVICE_CONFIG = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})


def status_of(error: BaseException) -> grpc.StatusCode:
    """Status code that stands for one of our errors; INTERNAL for anything else."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.INTERNAL


def error_of(target: str, error: grpc.aio.AioRpcError) -> errors.SlipstreamError:
    """Our error for a failed call; the message names the target."""
    kind = _ERRORS.get(error.code(), errors.SlipstreamError)
    return kind(f"{target}: {error.details() or error.code().name}")


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Turns errors raised by handlers into status codes, and logs those nobody meant to raise.

    Until `ready` is set, calls are refused as UNAVAILABLE, which clients take for "try again"; health and
    reflection always answer.
    """

    def __init__(self, ready: asyncio.Event | None) -> None:
        self._ready = ready

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith("/grpc."):
            return handler
        if self._ready is not None and not self._ready.is_set():
            return _refusing(handler)
        if handler.unary_unary:
            inner = handler.unary_unary

            async def unary(request: Any, context: Any) -> Any:
                try:
                    return await inner(request, context)
                except Exception as error:
                    await _abort(method, context, error)

            return grpc.unary_unary_rpc_method_handler(
                unary, handler.request_deserializer, handler.response_serializer
            )
        if handler.unary_stream:
            inner_stream = handler.unary_stream

            async def stream(request: Any, context: Any) -> Any:
                try:
                    async for response in inner_stream(request, context):
                        yield response
                except Exception as error:
                    await _abort(method, context, error)

            return grpc.unary_stream_rpc_method_handler(
                stream, handler.request_deserializer, handler.response_serializer
            )
        return handler


def _refusing(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    async def refuse(request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the service is still starting")

    async def refuse_stream(request: Any, context: Any) -> Any:
        await refuse(request, context)
        yield

    if handler.unary_stream:
        return grpc.unary_stream_rpc_method_handler(refuse_stream, handler.request_deserializer)
    return grpc.unary_unary_rpc_method_handler(refuse, handler.request_deserializer)


async def _abort(method: str, context: Any, error: Exception) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    code = status_of(error)
    if code is grpc.StatusCode.INTERNAL:
        _log.exception("%s failed", method)
    await context.abort(code, str(error) or type(error).__name__)


def make_server(ready: asyncio.Event | None = None) -> grpc.aio.Server:
    """A server with our limits, keepalive rules and error mapping.

    Args:
        ready: until it is set, calls are refused as UNAVAILABLE; None for a server that is always ready.
    """
    options = [
        *_LIMITS,
        *_KEEPALIVE,
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.so_reuseport", 0),
    ]
    return grpc.aio.server(
        interceptors=[*rpc_telemetry.server_interceptors(), ErrorInterceptor(ready)], options=options
    )


def make_channel(target: str) -> grpc.aio.Channel:
    """A channel with our limits and keepalive, spreading calls over all addresses of the target."""
    return grpc.aio.insecure_channel(
        target,
        options=[*_LIMITS, *_KEEPALIVE, ("grpc.service_config", _SERVICE_CONFIG)],
        interceptors=rpc_telemetry.client_interceptors(),
    )


async def call(
    target: str,
    method: Callable[..., Awaitable[Any]],
    request: Any,
    *,
    timeout_s: float,
    attempts: int = 1,
    pause_s: float = 0.2,
) -> Any:
    """Makes a unary call with a deadline, mapping failures to our errors.

    Args:
        attempts: how often to try while the target is UNAVAILABLE, with doubling pauses. Only for
            calls that may be repeated.
    """
    for attempt in range(attempts):
        try:
            return await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or attempt + 1 == attempts:
                raise error_of(target, error) from None
        await asyncio.sleep(min(pause_s * 2**attempt, 5.0))
    raise AssertionError("unreachable")
