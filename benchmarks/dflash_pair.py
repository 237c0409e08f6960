"""Section `pair` of `dflash_gpu.py`: the built-in target and draft on held-out word problems.

At T = 0 and T = 1, plain decoding (`ar`) and `dflash` at its whole block, fixed and by default,
where drafts that do not pay are switched off ("adaptive"):

- Accepted: rounds one by one over all problems. The mean accepted length counts the bonus token of
  a round. `emitted_per_round` counts only tokens that reached the text, up to its end mark.
- Entropy of the target's distribution (T = 1, nats a token) along the texts of `ar`.
- Texts that differ from those of `ar`: in the type that is timed, and with exact products in
  float32, where there must be none.
- Wall clock of `dj.generate`'s loop and of `LLM.generate` by batch, all settings in each turn. The
  speed-up is to `ar` in the same turn; its median is reported. The loop times decoding alone,
  because prompts are prefilled before; `LLM` computes its prompts again in every call.
"""

import dataclasses
import functools
import math
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax.api import generate
from dllm_jax.loading.model import Model
from dllm_jax.loading.sources import LoadError
from dllm_jax.models.architecture import arch_of
from dllm_jax.models.dense import random_params
from dllm_jax.models.families import parse_config
from dllm_jax.models.published import PUBLISHED
from dllm_jax.strategies import AR, DFlash
from dllm_jax.strategies.core.state import RUNNING, STOP
from dllm_jax.tasks import evaluate
from dllm_jax.tasks.problems import is_correct

SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 1024,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "bos_token_id": 1,
}

BAR_LENGTH, BAR_SPEEDUP, BAR_SLOWEST = 5.0, 2.5, 0.97
TO_THE_END = 1 << 20
WATCHED = 32  # the batch whose rounds are looked at
HALVES = ("plain", "hard")
SMOKE = "made:tiny"  # random models with the built-in tokenizer


def add_arguments(parser):
    parser.add_argument("--target", default="builtin:tiny-qwen3")
    parser.add_argument("--with-draft", default="builtin:tiny-qwen3-dflash")
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--batches", type=_ints, default=(1, 8, 32))
    parser.add_argument("--last-batches", type=_ints, default=(256,), help="if time is left")
    parser.add_argument("--llm-batches", type=_ints, default=(1, 32))
    parser.add_argument("--text", type=int, default=evaluate.MAX_TOKENS, help="most tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pair-within", type=float, default=150.0)


def make_small(args):
    """Sizes for a CPU."""
    args.problems, args.batches, args.text = 2, (2,), 8
    args.llm_batches = args.last_batches = ()
    args.repeats = 2


def small_model(name, sizes, seed):
    """A random model of a published kind with small sizes, in float32."""
    parsed = parse_config({**PUBLISHED[name], **sizes}, name=name)
    arch = arch_of(parsed.config)
    params = random_params(jax.random.key(seed), arch.param_shapes(parsed.config, "float32"))
    return Model(params, parsed.config, arch, parsed.defaults, source=f"small:{name}")


def target_or_none(args):
    """The pair's target, for its plain step; None before it is built in."""
    try:
        return load_pair(args, "auto")[0]
    except LoadError:
        return None


def load_pair(args, dtype):
    """Target and draft; in their place for a smoke run, random ones that need no training."""
    if args.target != SMOKE:
        target = dj.load(args.target, dtype=dtype)
        kind = str(target.params["embed"].dtype)
        return target, dj.load(args.with_draft, dtype=kind)
    source = dj.load("builtin:tiny-sdar")
    sizes = SMALL | {"vocab_size": source.config.vocab_size, "num_hidden_layers": 2}
    ids = {"eos_token_id": source.defaults.stop_token_ids[0]}
    taps = {"target_layer_ids": [0, 1], "mask_token_id": source.config.mask_token_id}
    taps |= {"block_size": 4}
    target = small_model("Qwen/Qwen3-8B", sizes | ids, 0)
    draft = small_model("z-lab/Qwen3-8B-DFlash-b16", sizes | ids | {"dflash_config": taps}, 1)
    named = target.replace(source=SMOKE, tokenizer_source=source.tokenizer_source)
    return named, draft.replace(source=f"{SMOKE}-draft")


def settings_of(draft):
    """Strategies by name, `ar` first, and the draft of each."""
    width = draft.config.block_size
    return {
        "ar": (AR(), None),
        f"dflash, width {width}": (DFlash(width=width), draft),
        "dflash, adaptive": (DFlash(), draft),
    }


@dataclasses.dataclass(frozen=True)
class Work:
    """Prompts of one bucket."""

    problems: list
    prompts: np.ndarray  # [N T]
    lengths: np.ndarray  # [N]

    def some(self, first, count):
        """So many of them, from the first again where they end."""
        rows = np.arange(first, first + count) % len(self.prompts)
        return jnp.asarray(self.prompts[rows]), jnp.asarray(self.lengths[rows])

    def lists(self, count):
        rows = np.arange(count) % len(self.prompts)
        return [self.prompts[i, : self.lengths[i]].tolist() for i in rows]


def make_work(model, count):
    """Held-out problems, halves in turn."""
    halves = [evaluate.held_out(half, -(-count // 2), 1) for half in HALVES]
    problems = [one for both in zip(*halves, strict=True) for one in both][:count]
    ids = evaluate.encode(model, problems)
    lengths = np.array([len(row) for row in ids])
    prompts = np.zeros((count, lengths.max()), np.int32)
    for i, row in enumerate(ids):
        prompts[i, : len(row)] = row
    return Work(problems, prompts, lengths)


class Decoder:
    """`dj.generate`'s two halves for one model and setting."""

    def __init__(self, model, setting, text):
        self.model, (self.strategy, self.draft), self.text = model, setting, text

    def start(self, work, first, batch, temperature):
        prompts, lengths = work.some(first, batch)
        session = generate.start(
            self.model,
            prompts,
            self.strategy,
            prompt_len=lengths,
            draft=self.draft,
            max_tokens=self.text,
            temperature=temperature,
        )
        return jax.block_until_ready(session)

    def finish(self, session):
        return jax.block_until_ready(generate.advance(self.model, session, TO_THE_END))

    def warm(self, work, batch):
        """Compile both halves for so many prompts."""
        self.finish(self.start(work, 0, batch, 0.0))


# --- what is accepted ---------------------------------------------------------------------------


def watch(decoder, work, batch, temperature):
    """Rounds one by one: their lengths by problem, and the texts.

    Returns:
        Lengths of each round, by problem; token lists; whether each text ended with a stop id.
    """
    count, rounds, texts, stopped = len(work.prompts), [], [], []
    for first in range(0, count, batch):
        session = decoder.start(work, first, batch, temperature)
        mine = [[] for _ in range(batch)]
        while True:
            state = session.state
            start, running = np.asarray(state.buffer.start), np.asarray(state.finish) == RUNNING
            if not running.any():
                break
            session = generate.advance(decoder.model, session, 1)
            moved = np.asarray(session.state.buffer.start) - start
            for i in np.flatnonzero(running):
                mine[i].append(int(moved[i]))
        output, length = np.asarray(state.output), np.asarray(state.output_len)
        rounds += mine
        texts += [output[i, : length[i]].tolist() for i in range(batch)]
        stopped += (np.asarray(state.finish) == STOP).tolist()
    return rounds[:count], texts[:count], stopped[:count]


def accepted(rounds, texts, stopped, width):
    """What rounds of these lengths say."""
    every = np.array([n for mine in rounds for n in mine])
    emitted = sum(len(text) + stop - 1 for text, stop in zip(texts, stopped, strict=True))
    return {
        "rounds": len(every),
        "mean_accepted_length": float(every.mean()),
        "emitted_per_round": emitted / len(every),
        "accepted_per_position": [float(np.mean(every > j)) for j in range(1, width)],
        "rounds_of_length": np.bincount(every, minlength=width + 1)[1:].tolist(),
    }


def entropy(model, work, texts):
    """Nats a token of the target's law along texts, at temperature 1."""
    total = count = 0.0
    longest = max(n + len(t) for n, t in zip(work.lengths, texts, strict=True))
    size = -(-int(longest) // 64) * 64

    @jax.jit
    def law(model, ids):
        logits = model.logits(ids, "causal")
        never = model.forbidden(jnp.arange(logits.shape[-1]))
        log = jax.nn.log_softmax(jnp.where(never[None, None], -jnp.inf, logits), axis=-1)
        return -jnp.sum(jnp.where(log > -jnp.inf, jnp.exp(log) * log, 0.0), axis=-1)

    for first in range(0, len(texts), 16):
        ids = np.zeros((16, size), np.int32)
        rows = range(first, min(first + 16, len(texts)))
        for i in rows:
            whole = [*work.prompts[i, : work.lengths[i]].tolist(), *texts[i]]
            ids[i - first, : len(whole)] = whole
        found = np.asarray(law(model, jnp.asarray(ids)))
        for i in rows:
            begin = work.lengths[i] - 1  # whose row predicts the first token of the text
            total += found[i - first, begin : begin + len(texts[i])].sum()
            count += len(texts[i])
    return total / max(count, 1)


def acceptance(decoders, pair, work, batch, report):
    """Lengths, entropy and texts unlike those of `ar` of every setting and temperature."""
    (target, own), model = pair, report.content["pair"]["target"]
    for temperature in (0.0, 1.0):
        of = {"section": "pair", "model": model, "temperature": temperature}
        plain = run_all(decoders["ar"], work, batch, temperature)
        for name, decoder in decoders.items():
            rounds, texts = [], plain
            if name != "ar":
                rounds, texts, stopped = watch(decoder, work, batch, temperature)
            measured = {"problems": len(texts), "rows_unlike_ar": _unlike(plain, texts)}
            measured["solved"] = solved(target, work, texts)
            if name == "ar":
                measured["entropy_nats"] = float(entropy(target, work, texts))
            else:
                measured |= accepted(rounds, texts, stopped, own.config.block_size)
                measured |= by_half(rounds, work)
            report.row(**of, name=name, through="rounds", **measured)
            print(accepted_line(name, temperature, measured), flush=True)


def run_all(decoder, work, batch, temperature):
    """The texts of every problem."""
    texts = []
    for first in range(0, len(work.prompts), batch):
        state = decoder.finish(decoder.start(work, first, batch, temperature)).state
        output, length = np.asarray(state.output), np.asarray(state.output_len)
        texts += [output[i, : length[i]].tolist() for i in range(batch)]
    return texts[: len(work.prompts)]


def solved(model, work, texts):
    """The share of right answers, by half."""
    read = functools.partial(model.tokenizer.decode, skip_special_tokens=True)
    right = {half: [] for half in HALVES}
    for one, text in zip(work.problems, texts, strict=True):
        right[one.half].append(is_correct(read(text), one))
    return {half: float(np.mean(found)) for half, found in right.items() if found}


def by_half(rounds, work):
    """The mean accepted length of each half."""
    found = {half: [] for half in HALVES}
    for one, mine in zip(work.problems, rounds, strict=True):
        found[one.half] += mine
    means = {half: float(np.mean(lengths)) for half, lengths in found.items() if lengths}
    return {"mean_accepted_length_by_half": means}


def accepted_line(name, temperature, measured):
    parts = [f"pair T={temperature:g} {name}: solved {measured['solved']}"]
    if "entropy_nats" in measured:
        parts.append(f"entropy {measured['entropy_nats']:.2g} nats a token")
    else:
        parts.append(
            f"accepted length {measured['mean_accepted_length']:.2f} (bonus counted), by half "
            f"{measured['mean_accepted_length_by_half']}, emitted "
            f"{measured['emitted_per_round']:.2f} a "
            f"round, by position {[round(x, 2) for x in measured['accepted_per_position']]}"
        )
        parts.append(f"unlike ar: {measured['rows_unlike_ar']} of {measured['problems']}")
    return ", ".join(parts)


# --- wall clock ---------------------------------------------------------------------------------


def loop_once(decoder, work, batch, temperature, calls):
    """Seconds of prefill and of decoding, steps and tokens of `calls` batches."""
    prefill_s = decode_s = steps = tokens = 0
    for call in range(calls):
        began = time.perf_counter()
        session = decoder.start(work, call * batch, batch, temperature)
        middle = time.perf_counter()
        state = decoder.finish(session).state
        decode_s += time.perf_counter() - middle
        prefill_s += middle - began
        steps += int(jnp.max(state.buffer.nfe))
        tokens += int(jnp.sum(state.output_len))
    return {"prefill_s": prefill_s, "decode_s": decode_s, "steps": steps, "tokens": tokens}


def llm_once(llm, work, batch, temperature, calls):
    """Wall seconds of `calls` batches of `LLM.generate`, tokens and forwards."""
    lists = work.lists(batch * calls)
    params = dj.SamplingParams(max_tokens=llm.text, temperature=temperature, seed=3)
    decode_s = tokens = steps = 0
    for call in range(calls):
        prompts = lists[call * batch : (call + 1) * batch]
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        decode_s += time.perf_counter() - began
        tokens += sum(len(o.outputs[0].token_ids) for o in outputs)
        steps += max(o.metrics.nfe for o in outputs)
    return {"decode_s": decode_s, "steps": steps, "tokens": tokens}


def race(runners, of, args, report, until):
    """Turns over all settings; a row each, with the speed-up against `ar`."""
    names, seen = list(runners), {name: [] for name in runners}
    for turn in range(args.repeats):
        if turn and time.perf_counter() > until:
            break
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            seen[name].append(runners[name]())
    line = []
    for name, samples in seen.items():
        spent = [one["decode_s"] for one in samples]
        gains = [a["decode_s"] / b["decode_s"] for a, b in zip(seen["ar"], samples, strict=True)]
        gain = statistics.median(gains)
        middle = sorted(samples, key=lambda one: one["decode_s"])[len(samples) // 2]
        row = {
            "wall_s": statistics.median(spent),
            "samples_s": spent,
            "steps": middle["steps"],
            "tokens": middle["tokens"],
            "step_ms": 1e3 * statistics.median(spent) / max(middle["steps"], 1),
            "tok_s": middle["tokens"] / statistics.median(spent),
            "speedup": gain,
            "least_speedup": min(gains),
            "most_speedup": max(gains),
        }
        if "prefill_s" in middle:
            row["loop_prefill_s"] = middle["prefill_s"]
        report.row(**of, name=name, **row)
        line.append(f"{name} {row['tok_s']:.0f} tok/s x{gain:.2f} ({row['step_ms']:.3f} ms a step)")
    print(
        f"pair {of['through']} T={of['temperature']:g} batch {of['slots']}: {'; '.join(line)}",
        flush=True,
    )


def make_llm(target, setting, work, args):
    """An engine for the batches that are timed."""
    strategy, draft = setting
    longest = int(work.lengths.max()) + args.text
    slots = max(args.llm_batches)
    columns = -(-longest // 64)
    config = dj.EngineConfig(
        max_num_seqs=slots,
        max_model_len=longest,
        enable_prefix_caching=False,
        num_pages=2 * (slots + 1) * (columns + 1),
        slot_buckets=tuple(sorted(args.llm_batches)),
        page_buckets=(columns,),
        prefill_buckets=(64 * math.ceil(int(work.lengths.max()) / 64),),
    )
    llm = dj.LLM(target, strategy, draft=draft, config=config, progress=False)
    llm.text = args.text
    return llm


def measure(args, report):
    """The section, in stages by value; whatever is not done by its end is named in `late`.

    Programs of a stage are compiled together and then timed, before those of the next are begun:
    tuning runs on the device too, so nothing is compiled while anything is timed.
    """
    began = time.perf_counter()
    until = began + args.pair_within
    target, draft = load_pair(args, "auto")
    work, settings = make_work(target, args.problems), settings_of(draft)
    kinds = {"target": target.source, "draft": draft.source}
    kinds |= {"dtype": str(target.params["embed"].dtype), "problems": len(work.problems)}
    report.put(pair=kinds)
    decoders = {name: Decoder(target, one, args.text) for name, one in settings.items()}
    ready = {}
    watched = WATCHED if WATCHED in args.batches else args.batches[0]
    for stage in stages(args.batches, list(settings)):
        jobs = {
            (batch, name): functools.partial(decoders[name].warm, work, batch)
            for batch, names in stage.items()
            for name in names
        }
        for batch, name in together(jobs, "loop", args, report, until):
            ready.setdefault(batch, {})[name] = decoders[name]
        for batch in stage:
            mine = {name: ready.get(batch, {}).get(name) for name in settings}
            mine = {name: one for name, one in mine.items() if one}
            time_all(mine, loop_once, "loop", batch, work, args, report, until)
            if batch == watched and mine.keys() == settings.keys():
                acceptance(mine, (target, draft), work, watched, report)
    if args.llm_batches:
        llms = make_llms(target, settings, work, args, report, until)
        for batch in args.llm_batches:
            time_all(llms, llm_once, "LLM", batch, work, args, report, until)
    compare_exact(args, work, min(watched, args.problems), report, until)
    for batch in args.last_batches:
        jobs = {name: functools.partial(one.warm, work, batch) for name, one in decoders.items()}
        done = together(jobs, f"loop, {batch}", args, report, until)
        mine = {name: one for name, one in decoders.items() if name in done}
        time_all(mine, loop_once, "loop", batch, work, args, report, until)
    verdict(report)


def stages(batches, names):
    """What is compiled together, by batch: the least that tells of one request, then the rest."""
    first, *rest = batches
    *plain, adaptive = names
    rest.sort(key=lambda batch: batch != WATCHED)
    return [{first: plain}, {first: [adaptive], **dict.fromkeys(rest, names)}]


class Loops:
    """Wall clock of the loop alone, of every setting and batch: compiled beside other work.

    Compiling begins at once; `settle` waits for it, and nothing is timed before.
    """

    def __init__(self, args, report, until):
        self._args, self._report, self._until = args, report, until
        target, draft = load_pair(args, "auto")
        self._work, settings = make_work(target, args.problems), settings_of(draft)
        self._decoders = {name: Decoder(target, one, args.text) for name, one in settings.items()}
        self._batches = (*args.batches, *args.last_batches)
        kinds = {"target": target.source, "draft": draft.source}
        report.put(pair=kinds | {"dtype": str(target.params["embed"].dtype)})
        jobs = {
            (batch, name): functools.partial(one.warm, self._work, batch)
            for batch in self._batches
            for name, one in self._decoders.items()
        }
        self._running, self._done = begun(jobs, args), None

    def settle(self):
        """Wait until all is compiled, or time is up."""
        if self._done is None:
            self._done = {*gathered(self._running, "loop", self._report, self._until)}

    def time(self):
        """Rows of what was compiled, and the least speed-up of the default."""
        self.settle()
        for batch in self._batches:
            mine = {n: one for n, one in self._decoders.items() if (batch, n) in self._done}
            how = self._args, self._report, self._until
            time_all(mine, loop_once, "loop", batch, self._work, *how)
        verdict(self._report)


def together(jobs, kind, args, report, until):
    """Run jobs that compile, by several threads: what those done in time returned, by name."""
    return gathered(begun(jobs, args), kind, report, until)


def begun(jobs, args):
    """Jobs by several threads: those threads, when they began, and the jobs by name."""
    pool = ThreadPoolExecutor(args.threads)
    return pool, time.perf_counter(), {name: pool.submit(_timed, j) for name, j in jobs.items()}


def gathered(started, kind, report, until):
    """What those of the jobs returned that are done in time, by name."""
    (pool, began, running), done = started, {}
    for name, job in running.items():
        try:
            done[name], spent = job.result(timeout=max(0.0, until - time.perf_counter()))
            print(f"pair, {kind}, {name}: ready after {spent:.1f} s", flush=True)
        except Exception as error:  # the others still count
            report.late(f"pair, {kind}, {name}: {type(error).__name__}: {error}"[:500])
    pool.shutdown(wait=False, cancel_futures=True)
    measured = {"kind": kind, "programs": len(running), "seconds": time.perf_counter() - began}
    report.put(ready=[*report.content.get("ready", []), measured])
    return done


def _timed(job):
    began = time.perf_counter()
    return job(), time.perf_counter() - began


def time_all(runners, once, through, batch, work, args, report, until):
    """Race so many requests at both temperatures."""
    for temperature in (0.0, 1.0):
        of = {"section": "pair", "model": report.content["pair"]["target"], "through": through}
        of |= {"slots": batch, "temperature": temperature}
        if time.perf_counter() > until or not {"ar"} < runners.keys():
            report.late(f"pair, {through}, {batch} slots, T={temperature:g}: not timed")
            continue
        calls = max(1, min(4, args.problems // batch))
        mine = {
            name: functools.partial(once, one, work, batch, temperature, calls)
            for name, one in runners.items()
        }
        for run in mine.values():
            run()  # prompts into prefix caches, programs to the device
        race(mine, of, args, report, until)


def make_llms(target, settings, work, args, report, until):
    """The engines by setting."""
    make = functools.partial(make_llm, target, work=work, args=args)
    jobs = {name: functools.partial(make, one) for name, one in settings.items()}
    return together(jobs, "LLM", args, report, until)


def compare_exact(args, work, batch, report, until):
    """Tokens of every setting in float32 with exact products: all must be those of `ar`."""
    if time.perf_counter() > until:
        return report.late("pair, float32: not begun")
    target, draft = load_pair(args, "float32")
    exact = {name: Decoder(target, one, args.text) for name, one in settings_of(draft).items()}
    jobs = {name: functools.partial(_warm_exact, one, work, batch) for name, one in exact.items()}
    done = together(jobs, "float32", args, report, until)
    if not {"ar"} < done.keys():
        return report.late("pair, float32: not compared")
    measured = {}
    for temperature in (0.0, 1.0):
        with jax.default_matmul_precision("highest"):
            said = {name: run_all(exact[name], work, batch, temperature) for name in done}
        measured[f"T={temperature:g}"] = {
            name: _unlike(said["ar"], texts) for name, texts in said.items() if name != "ar"
        }
    report.put(pair=report.content["pair"] | {"rows_unlike_ar_float32": measured})
    print(f"pair, texts unlike those of ar in float32, of {args.problems}: {measured}", flush=True)


def _unlike(texts, others):
    return sum(a != b for a, b in zip(texts, others, strict=True))


def _warm_exact(decoder, work, batch):
    with jax.default_matmul_precision("highest"):
        decoder.warm(work, batch)


def verdict(report):
    """The bars."""
    rows = [row for row in report.content["rows"] if row.get("section") == "pair"]
    drafts = [row for row in rows if row["name"] != "ar"]
    greedy = [r for r in drafts if r["temperature"] == 0 and r["through"] == "rounds"]
    alone = [r for r in drafts if r.get("slots") == 1 and r["temperature"] == 0]
    least = [r for r in drafts if "speedup" in r and r["name"] == "dflash, adaptive"]
    measured = {
        "accepted_length": max((r["mean_accepted_length"] for r in greedy), default=None),
        "accepted_length_bar": BAR_LENGTH,
        "speedup_at_1": {f"{r['through']}, {r['name']}": r["speedup"] for r in alone},
        "speedup_bar": BAR_SPEEDUP,
        "least_speedup_of_adaptive": min((r["speedup"] for r in least), default=None),
        "least_speedup_bar": BAR_SLOWEST,
    }
    report.put(pair=report.content["pair"] | measured)
    print(f"pair: {measured}", flush=True)


def _ints(text):
    return tuple(int(part) for part in text.split(",") if part)
