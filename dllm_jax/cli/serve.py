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
from dllm_jax.cli.interrupt import Interrupt
from dllm_jax.cli.serve_flags import (
    ADMIN_VARIABLE,
    KEY_VARIABLE,
    LIMITS,
    OF_ENGINE,
    OF_FRONT,
)

if TYPE_CHECKING:
    from dllm_jax.serve.child.process import Start
    from dllm_jax.serve.child.served import Served
    from dllm_jax.serve.keys import Key
    from dllm_jax.serve.service import Config

FAILED, BAD_USAGE = 1, 2
_HOSTS_GRACE_S = 10.0  # to let the other hosts end too


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
    parser.epilog = (
        "GET /health tells when the server is ready. The first Ctrl-C or SIGTERM lets running "
        "requests end. docs/http.md describes routes and fields, docs/security.md the limits."
    )
    flags.add(parser, *OF_FRONT, *OF_ENGINE)


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
        raise UsageError(
            f"serve needs the package {error.name}; in the clone, pip install -e '.[server]'"
        ) from error
    _name_model(args)
    _check_models(args)
    if args.chat_template is not None:
        _check_template(args.chat_template)
    if args.otlp_traces_endpoint is not None:
        _check_otel(args.otlp_traces_endpoint)
    keys, named, admin_keys = _every_key(args)
    from dllm_jax import __version__

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
        limits=Limits(**{name: getattr(args, name) for name in LIMITS.dests}),
    )


def _every_key(
    args: argparse.Namespace,
) -> "tuple[tuple[str, ...], tuple[Key, ...], tuple[str, ...]]":
    """Keys without limits, keys with them, and those of administrators."""
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
    return keys, named, admin_keys


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
