"""`dllm-jax serve MODEL`: the OpenAI-compatible HTTP server.

Data flow: flags -> a bound port -> the front process, which launches the engine process and tells
it to call `make_engine` here. Nothing of JAX is imported in the front.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dllm_jax.cli import flags
from dllm_jax.cli import strategy as strategies
from dllm_jax.cli.errors import UsageError, one_line
from dllm_jax.cli.flags import Group, flag, whole
from dllm_jax.cli.interrupt import Interrupt

if TYPE_CHECKING:
    from dllm_jax.serve.child.process import Start
    from dllm_jax.serve.child.served import Served
    from dllm_jax.serve.keys import Key
    from dllm_jax.serve.service import Config

KEY_VARIABLE, ADMIN_VARIABLE = "DLLM_API_KEY", "DLLM_ADMIN_KEY"
FAILED, BAD_USAGE = 1, 2
_HOSTS_GRACE_S = 10.0  # to let the other hosts end too
_LOG_FORMATS = ("text", "json", "none")
_EXTRA = "in the clone, pip install -e '.[server]'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
    parser.epilog = (
        "GET /health tells when the server is ready. The first Ctrl-C or SIGTERM lets running "
        "requests end. docs/http.md describes routes and fields, docs/security.md the limits."
    )
    flags.add(parser, *OF_FRONT, *OF_ENGINE)


OF_FRONT = (
    Group("", flag("source MODEL", "as --model, which it takes the place of", nargs="?")),
    Group(
        "server",
        flag(
            "--config FILE",
            "flags from a file, .yaml or .toml: `port: 80`; those of the command line win "
            "(default: none)",
        ),
        flag("--host", "address to listen on", default="127.0.0.1"),
        flag("--port", "0: any", whole(0, 65535), 8000),
        flag("--served-model-name NAME", "what requests call the model (default: MODEL)"),
        flag(
            "--api-key KEY",
            f"opens every route but /health and /live; repeat it for several. ${KEY_VARIABLE} and "
            "--api-key-file keep it out of the process list (default: none)",
            default=[],
            action="append",
        ),
        flag("--api-key-file FILE", "a key a line"),
        flag(
            "--key-file FILE",
            "further keys with limits of their own, a line each: NAME KEY [texts=N] [waiting=N] "
            "[tokens_per_minute=N] [compile_s_per_minute=N]; log and metrics have the name",
        ),
        flag(
            "--isolate-prefix-cache",
            "a key finds cached prefixes of its own requests alone",
            bool,
        ),
        flag(
            "--admin-key-file FILE",
            f"a key a line, for routes of an administrator; ${ADMIN_VARIABLE} has one as well "
            "(default: there are no such routes)",
        ),
        flag(
            "--weights-root DIR",
            "folder within which an administrator may have other weights read (default: none)",
        ),
        flag(
            "--allowed-host NAME",
            "a name the Host header may hold where no key is set (default: loopback names)",
            default=[],
            action="append",
        ),
        flag(
            "--allowed-origin ORIGIN",
            "a web origin whose pages may call, as https://example.org",
            default=[],
            action="append",
        ),
        flag("--open-metrics", "/metrics needs no key", bool),
        flag("--no-vllm-metrics", "leave the vllm:* names out of /metrics", bool),
        flag(
            "--restart-engine N",
            "replace an engine process that died up to N times (default: exit with status 1)",
            whole(0),
            0,
        ),
        flag(
            "--stall-timeout S",
            "seconds without a step, while requests run, after which /health answers 503",
            flags.seconds_above_0,
            30.0,
        ),
        flag(
            "--drain-timeout S",
            "seconds running requests get after the first signal",
            flags.seconds,
            30.0,
        ),
        flag(
            "--log-format", "of every line; none: warnings and errors alone", _LOG_FORMATS, "text"
        ),
        flag(
            "--log-stats-every S",
            "seconds between two lines of throughput, while there is work; 0: none",
            flags.seconds,
            0.0,
        ),
        flag(
            "--otlp-traces-endpoint URL",
            "where a span of each request is sent, as http://127.0.0.1:4318/v1/traces; needs the "
            "extra otel (default: nowhere)",
        ),
    ),
    Group(
        "limits",
        flag(
            "--request-timeout S",
            "seconds after which a text ends with 'length'",
            flags.seconds_above_0,
            600.0,
        ),
        flag("--max-waiting N", "texts waiting for a slot; more are answered 429", whole(1), 256),
        flag(
            "--max-connections N",
            "open connections; over it a silent one is closed for each new one",
            whole(1),
            1024,
        ),
        flag("--max-body-bytes N", "bytes of a request", whole(1), 4 << 20),
        flag("--max-texts N", "prompts times n of a request", whole(1), 128),
        flag(
            "--min-priority N",
            "the first priority that a request may ask for; lower ones go before others'",
            whole(-(2**31) + 1),
            0,
        ),
        flag(
            "--max-denoise-streams N",
            "streams of denoise frames; one makes every chunk of the batch a step long",
            whole(0),
            2,
        ),
    ),
)
OF_ENGINE = (  # what the engine process must know
    flags.MODEL,
    Group(
        "",
        flag(
            "--chat-template FILE",
            "Jinja in the place of the model's chat template (default: the model's)",
        ),
    ),
    flags.strategy(),
    flags.DRAFT,
    flags.ENGINE,
    Group(
        "engine process",
        flag("--seed N", "of requests that bring none", flags.seed, 0),
        flag("--no-warm-up", "compile each size when it is first met", bool),
        flag(
            "--batch-invariant",
            "a request has the same tokens bit for bit in any batch (docs/same_tokens.md)",
            bool,
        ),
        flag(
            "--logprobs",
            "requests may ask for log-probabilities, for which each step reads the head once more "
            "(docs/logprobs.md)",
            bool,
        ),
        flag(
            "--warm-up-constraints",
            "compile the programs of structured output before the server is ready; else the first "
            "such request waits while a thread compiles them (default: only on an accelerator)",
            action=argparse.BooleanOptionalAction,
        ),
        flag(
            "--tool-format NAME",
            "how tools and calls stand in the texts of a model whose template has none "
            "(docs/agents.md)",
            ("hermes", "xml", "gemma4", "llama_json"),
        ),
    ),
    Group(
        "several hosts",
        flag(
            "--nnodes N",
            "processes that share the model over all of their devices; the same command on each, "
            "but for --node-rank",
            whole(1),
            1,
        ),
        flag("--node-rank R", "of this process; 0 serves, the others serve it", whole(0), 0),
        flag(
            "--coordinator HOST:PORT", "a free port of the host of rank 0 (default: none, one host)"
        ),
    ),
)


def run(args: argparse.Namespace, stop: Interrupt) -> int:
    """Serve until a signal or a failure; while it serves, the server takes the signals."""
    _check_nodes(args)
    if args.node_rank:
        return _follow(args)
    try:
        return _serve(args)
    except ValueError as error:
        if args.log_format != "json" or args.debug:
            raise
        from dllm_jax.serve.logs import Log

        Log("json").line("error", "error", said=one_line(error))
        return BAD_USAGE if isinstance(error, UsageError) else FAILED


def _serve(args: argparse.Namespace) -> int:
    config = config_of(args)
    from dllm_jax.serve.server import bind
    from dllm_jax.serve.server import run as serve

    try:
        sock = bind(args.host, args.port)
    except OSError as error:
        raise UsageError(
            f"{args.host}:{args.port} cannot be listened on ({error.strerror or error}); "
            "choose another --host or --port"
        ) from error
    return serve(config, sock)


def _name_model(args: argparse.Namespace) -> None:
    if args.source is not None:
        args.model = args.source


def _check_nodes(args: argparse.Namespace) -> None:
    if args.nnodes > 1 and args.coordinator is None:
        raise UsageError(f"--nnodes {args.nnodes} needs --coordinator HOST:PORT")
    if args.coordinator is not None and args.nnodes == 1:
        raise UsageError("--coordinator is for several hosts; give --nnodes")
    if args.node_rank >= args.nnodes:
        raise UsageError(
            f"--node-rank {args.node_rank} is not in [0, {args.nnodes - 1}], the ranks of --nnodes "
            f"{args.nnodes}"
        )


def _follow(args: argparse.Namespace) -> int:
    """Run a process of another rank; it ends when rank 0 does."""
    from dllm_jax.engine.layout import DeviceFailure

    _name_model(args)
    try:
        _make_llm(args, lambda *_: None)
    except DeviceFailure as failure:
        raise UsageError(str(failure)) from failure
    return 0


def config_of(args: argparse.Namespace) -> "Config":
    """The server that the flags describe.

    Raises:
        UsageError: A package is missing, or flags contradict each other.
        LoadError: There is no such model.
    """
    try:
        import httptools  # noqa: F401
        import uvicorn  # noqa: F401
        import uvloop  # noqa: F401

        from dllm_jax.serve.limits import Limits
        from dllm_jax.serve.pipe import Launch
        from dllm_jax.serve.service import Config
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn", "httptools", "uvloop", "msgspec"):
            raise
        raise UsageError(f"serve needs the package {error.name}; {_EXTRA}") from error
    _name_model(args)
    _check_models(args)
    if args.chat_template is not None:
        _check_template(args.chat_template)
    if args.otlp_traces_endpoint is not None:
        _check_otel(args.otlp_traces_endpoint)
    keys = _keys(args.api_key, args.api_key_file, KEY_VARIABLE)
    admin_keys = _keys([], args.admin_key_file, ADMIN_VARIABLE)
    named = _named_keys(args.key_file)
    own = {one.key for one in named}
    if own & set(keys):
        raise UsageError("a key of --key-file is one of --api-key, too; give it one place")
    if args.isolate_prefix_cache and not (keys or named):
        raise UsageError("--isolate-prefix-cache tells clients by their keys; give --key-file")
    if (set(keys) | own) & set(admin_keys):
        raise UsageError("a key opens both all routes and those of an administrator; give two")
    if args.weights_root is not None:
        if not admin_keys:
            raise UsageError(
                "--weights-root is for an administrator; give --admin-key-file as well"
            )
        if not os.path.isdir(args.weights_root):
            raise UsageError(f"--weights-root {args.weights_root!r} is no folder; make it first")
    if "*" in args.allowed_origin and (keys or named):
        raise UsageError("--allowed-origin * with a key; name the origins")
    from dllm_jax import __version__

    limits = Limits(
        max_body_bytes=args.max_body_bytes,
        max_texts=args.max_texts,
        max_waiting=args.max_waiting,
        min_priority=args.min_priority,
        max_connections=args.max_connections,
        request_timeout=args.request_timeout,
        max_denoise_streams=args.max_denoise_streams,
    )
    return Config(
        model=args.served_model_name or args.model,
        launch=Launch(
            "dllm_jax.cli.serve:make_engine",
            _settings(args),
            grace_s=_HOSTS_GRACE_S if args.nnodes > 1 else 0.0,
        ),
        version=__version__,
        host=args.host,
        port=args.port,
        api_keys=keys,
        keys=named,
        isolate_prefix_cache=args.isolate_prefix_cache,
        admin_keys=admin_keys,
        weights_root=args.weights_root,
        allowed_hosts=tuple(args.allowed_host),
        allowed_origins=tuple(args.allowed_origin),
        open_metrics=args.open_metrics,
        vllm_metrics=not args.no_vllm_metrics,
        restart_engine=args.restart_engine,
        stall_timeout=args.stall_timeout,
        drain_timeout=args.drain_timeout,
        log_format=args.log_format,
        log_stats_every=args.log_stats_every,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
        limits=limits,
    )


def _check_models(args: argparse.Namespace) -> None:
    from dllm_jax.loading.sources import LoadError, check_local

    check_local(args.model)
    if args.draft is not None:
        try:
            check_local(args.draft)
        except LoadError as error:
            raise LoadError(f"draft: {error}") from error


def _check_template(path: str) -> None:
    from jinja2 import Environment, TemplateError

    from dllm_jax.cli.prompts import read_file

    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(read_file("chat template", path))
    except TemplateError as error:
        raise UsageError(f"--chat-template {path!r} is no Jinja: {error}; mend it") from error


def _check_otel(endpoint: str) -> None:
    if not endpoint.startswith(("http://", "https://")):
        raise UsageError(
            f"--otlp-traces-endpoint {endpoint!r} is no address of HTTP; give one as "
            "http://127.0.0.1:4318/v1/traces"
        )
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(
            "--otlp-traces-endpoint needs the extra otel; in the clone, pip install -e "
            "'.[server,otel]'"
        ) from error


def _keys(given: list[str], file: str | None, variable: str) -> tuple[str, ...]:
    from dllm_jax.cli.prompts import read_file

    keys = [*given]
    if file is not None:
        keys += read_file("key file", file).splitlines()
    keys += [os.environ.get(variable, "")]
    keys = [key.strip() for key in keys if key.strip()]
    if not keys and (given or file):
        raise UsageError("the API key is empty; give at least one character")
    return tuple(keys)


def _named_keys(file: str | None) -> "tuple[Key, ...]":
    from dllm_jax.cli.prompts import read_file
    from dllm_jax.serve.keys import read_keys

    if file is None:
        return ()
    try:
        return read_keys(read_file("key file", file))
    except ValueError as error:
        raise UsageError(f"--key-file: {error}") from None


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Settings for the engine process, as msgpack holds them."""
    return {name: getattr(args, name) for group in OF_ENGINE for name in group.dests}


def make_engine(settings: dict[str, Any], start: "Start") -> "Served":
    """The engine of these flags; called in the engine process.

    Raises:
        UnusableSettings: The flags ask for what does not exist.
        ValueError: The model does not load, or does not fit.
    """
    from dllm_jax.serve.child.commands import Commands
    from dllm_jax.serve.child.engine import served
    from dllm_jax.serve.child.process import UnusableSettings, yield_processor

    settings["set"] = [(key, value) for key, value in settings["set"]]
    args = argparse.Namespace(**settings)
    try:
        llm = _make_llm(args, start, start.phase)
    except UsageError as error:
        raise UnusableSettings(one_line(error)) from error
    yield_processor()
    made = served(llm)
    made.facts.tool_format = args.tool_format
    if args.chat_template is not None:
        from dllm_jax.cli.prompts import read_file

        made.facts.chat_template = read_file("chat template", args.chat_template)
    return made._replace(commands=Commands(llm, lambda path: _other(args, path)))


def _other(args: argparse.Namespace, path: str) -> Any:
    """The model of another folder, loaded as that of the command line was."""
    from dllm_jax.cli.sources import load_model

    return load_model(argparse.Namespace(**{**vars(args), "model": path, "revision": None}))


def _join(args: argparse.Namespace) -> None:
    """Meet the processes of the other ranks; the model is over the devices of all."""
    import jax

    from dllm_jax.cluster.hosts import COORDINATOR
    from dllm_jax.loading.jax_settings import enable_async_dispatch

    enable_async_dispatch()
    os.environ[COORDINATOR] = args.coordinator  # where process 0 is reached later, too
    jax.distributed.initialize(args.coordinator, args.nnodes, args.node_rank)
    if args.tensor_parallel_size == 1:
        args.tensor_parallel_size = jax.device_count()


def _make_llm(
    args: argparse.Namespace,
    progress: Callable[[int, int], None],
    phase: Callable[..., None] | None = None,
) -> Any:
    from dllm_jax.api.llm import LLM
    from dllm_jax.cli.engine import engine_config
    from dllm_jax.cli.sources import load_model
    from dllm_jax.loading.chat import note

    if args.nnodes > 1:
        _join(args)
    chosen = strategies.load(args.strategy)
    began = time.perf_counter()
    model = load_model(args)
    if phase is not None:
        phase("load", time.perf_counter() - began, source=model.source)
    if said := note(model):
        print(f"note: {said}", file=sys.stderr, flush=True)
    fields = strategies.given_fields(args)
    strategy = strategies.resolve(model, args.strategy, chosen, fields, args.draft)
    began = time.perf_counter()
    llm = LLM(
        model,
        strategy,
        draft=args.draft,
        attention_implementation=args.attention_implementation,
        tensor_parallel_size=args.tensor_parallel_size,
        seed=args.seed,
        warm_up=not args.no_warm_up,
        warm_up_constraints=args.warm_up_constraints,
        progress=lambda name, done, total: progress(done, total),
        config=engine_config(args, batch_invariant=args.batch_invariant, logprobs=args.logprobs),
    )
    if phase is not None:
        device = llm.engine.runner.device
        made_s = time.perf_counter() - began - device.compile_s
        phase("engine", made_s, memory=str(llm.memory), **_plan(llm.memory))
        phase("compile", device.compile_s, programs=len(device.compiled))
    return llm


def _plan(memory: Any) -> dict[str, int]:
    """The figures of a memory plan that the log has."""
    names = ("limit_bytes", "weights_bytes", "pool_bytes", "temp_bytes", "num_pages", "page_size")
    return {name: getattr(memory, name) for name in names}
