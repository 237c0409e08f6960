"""A server whose engine is a script: no model, no JAX, and faults when a request's seed asks.

With `replies` in the settings it plays an agent's model: the answer to a request with tools is the
reply whose number is that of the assistant's turns in the prompt; other requests get `plain`.

Run as `python -m tests.serve.scripted '{"restart_engine": 1}'`; the fields are those of `Config`,
and `limits` those of `Limits`.
"""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from dllm_jax.engine.checks import Refused
from dllm_jax.engine.requests import CompletionOutput, Metrics, Request, RequestOutput
from dllm_jax.serve.pipe import Counts, Facts, Launch
from dllm_jax.structured import Tools

FOLDER = Path(__file__).resolve().parents[2] / "dllm_jax" / "builtin" / "tiny-sdar"
# A template of a model that thinks, for `chat_template` in the settings.
THINKS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|assistant|> ' + m['content'] | "
    "trim + '<|eos|>' }}{% else %}{{ '<|user|>' + m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}{# <think></think> #}"
)
STEP_S = 0.004
A_STEP = 4  # words a step
# Seeds that ask for something else than words.
DIES, HANGS, FAILS, RAISES, SLEEPS, REFUSED, WAITS = 101, 102, 103, 104, 105, 106, 107


class Script:
    """`word0 word1 ...`, four words a step, all requests at once.

    One whose seed is WAITS goes on after its first step once `may_end` says so.
    """

    def __init__(self, max_model_len, step_s, tokenizer=None, settings=None, may_end=None):
        self._most, self._step_s, self.may_end = max_model_len, step_s, may_end
        self._tokenizer, self._settings = tokenizer, settings or {}
        self._live = {}
        self._ended = []
        self.num_steps = self.tokens = self.nfe = self.prompts = 0

    def add(self, request):
        if request.params.seed == REFUSED:
            raise Refused("the script refuses it; take another seed", "seed", "invalid_value")
        self._live[request.request_id] = SimpleNamespace(
            request=request, done=0, added=time.monotonic(), nfe=0, ids=self._reply(request)
        )
        self.prompts += len(request.prompt_token_ids)
        return request.request_id

    def _reply(self, request):
        """The ids of an agent's turn; None: words."""
        replies = self._settings.get("replies")
        if replies is None:
            return None
        text = self._settings.get("plain", "Fine.")
        if isinstance(request.params.constraint, Tools):
            said = self._tokenizer.decode(request.prompt_token_ids)
            text = replies[min(said.count("<|assistant|> "), len(replies) - 1)]
        return self._tokenizer.encode(text, add_special_tokens=False)

    def abort(self, request_id):
        live = self._live.pop(request_id, None)
        if live is not None:
            self._ended.append(self._output(live, "abort"))

    @property
    def has_work(self):
        return bool(self._live or self._ended)

    def step(self):
        time.sleep(self._step_s)
        outputs, self._ended = self._ended, []
        self.num_steps += 1
        for live in list(self._live.values()):
            seed = live.request.params.seed
            if seed == DIES and live.done:
                os._exit(9)
            if seed == RAISES:
                raise RuntimeError("the script raises")
            if live.done and (seed == HANGS or (seed == WAITS and not self.may_end())):
                continue
            if seed == SLEEPS and live.done:
                time.sleep(0.3)
            most = min(live.request.params.max_tokens, self._most)
            a_step = self._settings.get("a_step", A_STEP)
            live.done, live.nfe = min(live.done + a_step, most), live.nfe + 1
            self.tokens, self.nfe = self.tokens + a_step, self.nfe + 1
            if live.ids is not None and len(live.ids) <= most:
                live.done = min(live.done, len(live.ids))
                finish = "stop" if live.done == len(live.ids) else None
            else:
                finish = "length" if live.done >= most else None
            if seed == FAILS and live.done > A_STEP:
                finish = "error"
            if finish:
                del self._live[live.request.request_id]
            if finish or live.request.stream:
                outputs.append(self._output(live, finish))
        return outputs

    def _output(self, live, finish):
        request, now = live.request, time.monotonic()
        window = (None, 70, 71) if request.denoise else ()
        one = CompletionOutput(
            index=0,
            text="".join(f"word{i} " for i in range(live.done))
            if live.ids is None
            else self._tokenizer.decode(live.ids[: live.done]),
            token_ids=list(range(live.done)) if live.ids is None else live.ids[: live.done],
            finish_reason=finish,
            window=window,
        )
        others = [dataclasses.replace(one, index=i) for i in range(request.params.n)]
        metrics = Metrics(
            nfe=live.nfe * request.params.n,
            prefill_nfe=1,
            cached_tokens=0,
            num_preemptions=0,
            tokens_per_forward=float(A_STEP),
            ttfb_s=self._step_s,
            e2e_s=now - live.added,
            queue_s=0.0,
        )
        error = "the script's secret" if finish == "error" else None
        ids = list(request.prompt_token_ids)
        done = finish is not None
        return RequestOutput(request.request_id, None, ids, others, done, metrics, error)

    def stats(self):
        reported = dict.fromkeys(Counts.__struct_fields__, 0)
        reported |= {
            "num_running": len(self._live),
            "num_pages": 8,
            "num_pages_held": len(self._live),
        }
        reported |= {
            "prompt_tokens": self.prompts,
            "generated_tokens": self.tokens,
            "nfe": self.nfe,
        }
        return SimpleNamespace(**reported, num_steps=self.num_steps)


def make(settings, progress):
    """The engine of `settings`; with a `gate`, starting and WAITS wait until that file exists."""
    from dllm_jax.loading.tokenizer import read_tokenizer
    from dllm_jax.serve.child.process import Start
    from dllm_jax.serve.child.served import Served

    progress(1, 2)
    if isinstance(progress, Start):
        progress.phase("load", 0.0, source="scripted")
    gate = Path(settings.get("gate", FOLDER))
    while settings.get("slow") and not gate.exists():
        time.sleep(0.01)
    if settings.get("broken"):
        print("a line of the engine's own", file=sys.stderr)
        raise ValueError("the script does not start; mend it")
    facts = Facts(
        source="builtin:scripted",
        family="sdar",
        strategy="multi_bd",
        block_size=4,
        window=8,
        thresholds={"accept_threshold": (0.9, (0.0, 1.0, False, None))},
        max_model_len=settings.get("max_model_len", 4096),
        vocab_size=768,
        mask_token_id=1,
        num_slots=settings.get("num_slots", 8),
        dtype="none",
        jax="none",
        tokenizer_folder=str(FOLDER),
        answer_end=2,
        causal=settings.get("causal", False),
        chat_template=settings.get("chat_template"),
        tool_format=settings.get("tool_format", "hermes" if "replies" in settings else None),
    )
    tokenizer = read_tokenizer(FOLDER)
    step_s = settings.get("step_s", STEP_S)
    script = Script(facts.max_model_len, step_s, tokenizer, settings, gate.exists)

    def request(ids, suffix, fields):
        return Request(prompt_token_ids=ids, **fields)

    def read(texts):
        if texts[0].prompt_len > 600:
            raise ValueError("the script reads 600 tokens; ask less")
        return [[[-1.0 - i for i in range(len(row))] for row in text.labels] for text in texts], 1

    return Served(script, facts, tokenizer, request, read)


def main():
    """Serve on a free port."""
    from dllm_jax.serve.keys import Key
    from dllm_jax.serve.limits import Limits
    from dllm_jax.serve.server import bind, run
    from dllm_jax.serve.service import Config

    reported = json.loads(sys.argv[1])
    launch = Launch("tests.serve.scripted:make", reported.pop("settings", {}))
    limits = Limits(**reported.pop("limits", {}))
    reported["keys"] = [Key(*one) for one in reported.pop("keys", [])]
    reported = {name: tuple(v) if isinstance(v, list) else v for name, v in reported.items()}
    config = Config(
        model="scripted",
        launch=launch,
        version="0",
        limits=limits,
        **{"log_format": "json"} | reported,
    )
    return run(config, bind("127.0.0.1", 0))


if __name__ == "__main__":
    sys.exit(main())
