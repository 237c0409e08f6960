"""A server's settings and what its handlers share."""

import asyncio
import dataclasses
from concurrent.futures import ThreadPoolExecutor

from dllm_jax.serve import wire
from dllm_jax.serve.client import EngineClient
from dllm_jax.serve.exchange import Call
from dllm_jax.serve.keys import Key, Quotas
from dllm_jax.serve.limits import Admission, Limits
from dllm_jax.serve.logs import Log
from dllm_jax.serve.metrics import Metrics
from dllm_jax.serve.pipe import Counts, Facts, Launch
from dllm_jax.serve.refusals import Refusal, shown
from dllm_jax.serve.spans import Spans
from dllm_jax.serve.text import TextSide

INLINE_BYTES = 64 << 10  # smaller bodies cost less than a change of threads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A server.

    Attributes:
        model: What `GET /v1/models` calls the model, and requests name.
        launch: How the engine process is made.
        keys: Further ones, with names and limits.
        isolate_prefix_cache: A key finds prefixes of its own requests alone.
        admin_keys: Any of them opens the routes of an administrator; none: they do not exist.
        weights_root: The folder within which weights may be read while serving; None: none are.
        api_keys: Any of them opens every route but /health and /live; none: loopback names only.
        allowed_hosts: Names the Host header may hold without a key.
        allowed_origins: Web origins whose pages may call (CORS).
        open_metrics: /metrics needs no key.
        restart_engine: How often an engine that was ready is replaced when it ends.
        stall_timeout: Seconds without a step, while requests run, after which /health says so.
        drain_timeout: Seconds that running requests get after the first signal.
        log_stats_every: Seconds between two lines of throughput; 0: none.
        otlp_traces_endpoint: Where a span of each request is sent; None: nowhere.
    """

    model: str
    launch: Launch
    version: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    keys: tuple[Key, ...] = ()
    isolate_prefix_cache: bool = False
    admin_keys: tuple[str, ...] = ()
    weights_root: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    open_metrics: bool = False
    vllm_metrics: bool = True
    restart_engine: int = 0
    stall_timeout: float = 30.0
    drain_timeout: float = 30.0
    log_format: str = "text"
    log_stats_every: float = 0.0
    otlp_traces_endpoint: str | None = None
    limits: Limits = dataclasses.field(default_factory=Limits)

    @property
    def has_keys(self) -> bool:
        """Whether only those with a key may ask."""
        return bool(self.api_keys or self.keys)


class Service:
    """The objects that all handlers share.

    Attributes:
        engine: The engine process.
    """

    def __init__(self, config: Config, log: Log | None = None):
        self.config = config
        self.log = log or Log(config.log_format)
        self.metrics = Metrics(config.model, config.version, config.vllm_metrics)
        self.quotas = Quotas(config.keys, self.metrics.refused)
        self.engine = EngineClient(
            config.launch, config.restart_engine, self._counted, self.log.line
        )
        endpoint, about = config.otlp_traces_endpoint, (config.model, config.version)
        self.spans = None if endpoint is None else Spans(endpoint, *about)
        self.drain = asyncio.Event()  # an administrator ends the server
        self.commands = asyncio.Lock()  # of an administrator, one at a time
        self.admission = Admission(config.limits)
        # A single thread: several would compete for the GIL and delay the event loop.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="read")

    def _counted(self, counts: Counts) -> None:
        self.metrics.update(counts)
        for client, seconds, _ in counts.compiled:
            self.quotas.spend(client, "compile_s_per_minute", seconds)

    async def read(self, call: Call, kind: type[wire.Body]) -> wire.Body:
        """The body of a request; a large one is read in a thread, for it may hold a million values.

        Raises:
            Refusal: As `Call.body` and `wire.read`.
        """
        data = await call.body()
        if len(data) <= INLINE_BYTES:
            return wire.read(data, kind)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._reader, wire.read, data, kind)

    def close(self) -> None:
        """End the threads."""
        if self.spans is not None:
            self.spans.flush()
        self._reader.shutdown(wait=False, cancel_futures=True)

    def check_state(self) -> None:
        """Refuse what only a ready engine answers."""
        state = self.engine.state
        if state == "ready":
            return
        said = {
            "starting": "the engine is starting; try again in a moment (GET /health tells)",
            "paused": "an administrator has paused the server; try again later",
            "asleep": "the model sleeps; an administrator wakes it",
            "draining": "the server is shutting down; ask another one",
            "failed": "the engine has failed; the log says why",
        }
        code = "engine_failed" if state == "failed" else state
        retry = {"retry-after": "5" if state == "starting" else "30"}
        raise Refusal(said[state], code=code, status=503, headers=retry)

    def ready(self) -> tuple[Facts, TextSide]:
        """The facts and the text side of a ready engine."""
        self.check_state()
        assert self.engine.facts is not None
        assert self.engine.text is not None
        return self.engine.facts, self.engine.text

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served."""
        if name in (None, self.config.model):
            return
        raise Refusal(
            f"the model {shown(name)} is not served here; use {self.config.model!r}",
            param="model",
            code="model_not_found",
            status=404,
        )

    def check_texts(self, num_texts: int) -> None:
        """Refuse more texts than a request may have."""
        most = self.config.limits.max_texts
        if num_texts > most:
            raise Refusal(
                f"prompts times n are {num_texts}; at most {most} are taken in one request: send "
                "several",
                param="n",
            )
