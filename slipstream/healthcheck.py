"""Exit code 0 if a gRPC server is healthy: `python -m slipstream.healthcheck HOST:PORT`."""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def healthy(target: str, timeout_s: float = 3.0) -> bool:
    """Asks the standard health service."""
    with grpc.insecure_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    sys.exit(0 if healthy(sys.argv[1]) else 1)
