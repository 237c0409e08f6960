"""Replicas of the server behind Ray Serve: one address, sticky sessions, 429 when all are full.

    pip install -e '.[server]' 'ray[serve]'
    python examples/ray_serve.py --replicas 2 --port 8000 builtin:tiny-sdar --max-num-seqs 4

The flags behind MODEL are those of `dllm-jax serve`. Each replica is a front with an engine process
of its own; Ray starts it, asks for its health and replaces it. Requests with the same
`x-session-affinity` go to one replica, whose prefix cache knows the conversation. What a replica
was answering when it died ends with an error; nothing else is lost (docs/scale_out.md).
"""

import argparse
import asyncio
import os

SESSION_HEADER = "x-session-affinity"
# Ray reads it when it is imported, in each of its processes.
os.environ["RAY_SERVE_SESSION_ID_HEADER_KEY"] = SESSION_HEADER

from ray import serve  # noqa: E402
from ray.serve.config import (  # noqa: E402
    BackpressureConfig,
    HTTPOptions,
    RequestRouterConfig,
)

from dllm_jax.cli.entry import parse  # noqa: E402
from dllm_jax.cli.serve import config_of  # noqa: E402
from dllm_jax.serve.app import application  # noqa: E402
from dllm_jax.serve.service import Service  # noqa: E402

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
POLL_S = 0.2


def front():
    """The ASGI application of a replica, which hands requests to the replica's server."""

    async def route(scope, receive, send):
        if scope["type"] == "lifespan":
            for event in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{event}.complete"})
            return
        replica = serve.get_replica_context().servable_object
        await replica.served(scope, receive, send)

    return route


@serve.deployment
@serve.ingress(front)
class Replica:
    """A front and its engine process."""

    async def __init__(self, argv):
        self.service = Service(config_of(parse(["serve", *argv])))
        self.served = application(self.service)
        self.service.engine.start()
        while self.service.engine.state == "starting":
            await asyncio.sleep(POLL_S)
        await self.check_health()

    async def check_health(self):
        """Ray replaces a replica for which this raises."""
        if self.service.engine.state != "ready":
            raise RuntimeError(self.service.engine.failure)


def deploy(argv, replicas, running, waiting, port, cpus=1.0, gpus=0.0):
    """Start Ray's proxy and the replicas; returns once they are ready.

    Args:
        argv: MODEL and flags of `dllm-jax serve`.
        running: Requests a replica takes at once; at least its --max-num-seqs.
        waiting: Requests that wait in the proxy; more are answered 429.
    """
    deployment = Replica.options(
        num_replicas=replicas,
        max_ongoing_requests=running,
        max_queued_requests=waiting,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        health_check_period_s=2,
        graceful_shutdown_timeout_s=30,
    )
    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
    return serve.run(deployment.bind(argv), name="dllm", route_prefix="/")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--running", type=int, default=16, help="requests a replica takes at once")
    parser.add_argument("--waiting", type=int, default=32, help="more are answered 429")
    parser.add_argument("--cpus", type=float, default=1.0, help="of a replica")
    parser.add_argument("--gpus", type=float, default=0.0, help="of a replica")
    args, argv = parser.parse_known_args()
    deploy(argv, args.replicas, args.running, args.waiting, args.port, args.cpus, args.gpus)
    print(f"listening on http://127.0.0.1:{args.port}", flush=True)
    try:
        asyncio.run(asyncio.Event().wait())
    except KeyboardInterrupt:
        serve.shutdown()


if __name__ == "__main__":
    main()
