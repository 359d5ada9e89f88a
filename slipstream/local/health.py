"""Asking a process over gRPC whether it serves."""

import asyncio
from typing import Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.errors import SlipstreamError
from slipstream.rpc import make_channel


class Process(Protocol):
    """What is known of the process that should serve."""

    @property
    def name(self) -> str: ...

    @property
    def returncode(self) -> int | None: ...

    def failure(self) -> SlipstreamError: ...


async def check(target: str, timeout_s: float = 2.0) -> str:
    """State in words: `serving`, `not serving`, or `unreachable`."""
    async with make_channel(target) as channel:
        return await _check(health_pb2_grpc.HealthStub(channel), timeout_s)


async def until_serving(target: str, process: Process, timeout_s: float) -> None:
    """Waits until the target serves.

    Raises:
        SlipstreamError: the process ended first, or time ran out; the message shows the end of its log.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    async with make_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while (state := await _check(stub, 2.0)) != "serving":
            if process.returncode is not None:
                raise process.failure()
            if asyncio.get_running_loop().time() > deadline:
                raise SlipstreamError(
                    f"{process.name} is {state} after {timeout_s:.0f} s; {process.failure()}"
                )
            await asyncio.sleep(0.1)


async def _check(stub: health_pb2_grpc.HealthStub, timeout_s: float) -> str:
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    except grpc.aio.AioRpcError:
        return "unreachable"
    return "serving" if answer.status == health_pb2.HealthCheckResponse.SERVING else "not serving"
