"""The flags of `dllm-jax serve`: those of the front, and those that the engine process gets."""

import argparse

from dllm_jax.cli import flags
from dllm_jax.cli.flags import Group, flag, whole

KEY_VARIABLE, ADMIN_VARIABLE = "DLLM_API_KEY", "DLLM_ADMIN_KEY"
LIMITS = Group(  # by the names of `Limits`
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
)
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
            "--log-format",
            "of every line; none: warnings and errors alone",
            ("text", "json", "none"),
            "text",
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
    LIMITS,
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
        flags.INVARIANT,
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
