"""Health check of a container. Exit status 0: it serves.

python health.py https://localhost:8000/health CA    SuperLink
python health.py 127.0.0.1:9098                      SuperExec or SuperNode: its --health-server-address
"""

import ssl
import sys
import urllib.request

SECONDS = 5


def https(url: str, authority: str) -> None:
    urllib.request.urlopen(url, context=ssl.create_default_context(cafile=authority), timeout=SECONDS).close()


def grpc(address: str) -> None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        said = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
    if said.status != health_pb2.HealthCheckResponse.SERVING:
        raise SystemExit(1)


if __name__ == "__main__":
    https(*sys.argv[1:]) if sys.argv[1].startswith("https:") else grpc(*sys.argv[1:])
