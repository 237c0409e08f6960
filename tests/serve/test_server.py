"""Proves `dllm-jax serve` on the built-in model: its texts are those of `LLM.generate`.

One server for the module, started by the command line as a user starts it.
"""

import contextlib
import itertools
import json
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from dllm_jax.api.questions import Question
from tests.serve.driving import CHAT, ROOT, TEXT, Server, text_of, within
from tests.structured.texts import many_tools

pytestmark = pytest.mark.long

QUESTIONS = [
    "Ben earns 37 dollars a day and spends 29 dollars of it. Ben does this for 5 days. "
    "How many dollars does Ben have then?",
    "Fay earns 49 dollars a day and spends 8 dollars of it. Fay does this for 9 days. "
    "How many dollars are there in the end?",
]
PROMPTS = [f"<|user|>{question}<|assistant|>" for question in QUESTIONS]


# The model's own, in which calls may stand. It shows no tools: their prompt would be too long.
TEMPLATE = """{% for m in messages -%}
{% if m.role == "assistant" %}<|assistant|> {{ m.content | trim }}
{%- for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|eos|>{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}{# tools #}"""


def command(*flags):
    return ["-m", "dllm_jax.cli", "serve", *flags, "--port", "0", "--log-format", "json"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    flags = ("builtin:tiny-sdar", "--max-num-seqs", "4", "--page-size", "32", "--no-warm-up")
    flags += ("--logprobs",)  # texts are those of an `LLM` without
    (folder / "chat.jinja").write_text(TEMPLATE)
    flags += ("--chat-template", str(folder / "chat.jinja"))
    one = Server(command(*flags), folder / "log")
    try:
        yield one.wait_ready()
    finally:
        assert one.stop(signal.SIGTERM) == 0


@pytest.fixture(scope="module")
def llm():
    import dllm_jax as dj

    return dj.LLM("builtin:tiny-sdar", max_num_seqs=4, page_size=32, warm_up=False)


def test_the_port_is_bound_before_the_engine_is_there(server):
    assert [line["event"] for line in server.lines()][:2] == ["listening", "start"]


CASES = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 7},
    "nucleus": {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    "n": {"temperature": 1.0, "seed": 3, "n": 2},
    "stop": {"stop": ["dollars", "keeps"], "max_tokens": 64},
    "stop ids": {"stop_token_ids": [300, 301, 302]},
    "past the end": {"ignore_eos": True, "max_tokens": 48},
    "forwards": {"max_nfe": 1},
    "threshold": {"strategy_overrides": {"accept_threshold": 0.5}},
    "short": {"max_tokens": 3},
    # The first token is a byte that begins no character; some two forwards a token.
    "any bytes": {"temperature": 100.0, "seed": 7, "ignore_eos": True, "max_tokens": 8},
}


@pytest.mark.slow("^(?!.*(drawn|greedy|stop$))")
@pytest.mark.parametrize("name", CASES)
def test_texts_are_those_of_generate(server, llm, name):
    import dllm_jax as dj

    fields = {"max_tokens": 32, **CASES[name]}
    params = dj.SamplingParams(**{**fields, "stop": tuple(fields.get("stop", ()))})
    body = {"prompt": PROMPTS, **fields}
    with ThreadPoolExecutor(3) as pool:
        whole = pool.submit(server.post, TEXT, body)
        fast = pool.submit(server.events, TEXT, body)
        slow = pool.submit(server.events, TEXT, body, delay=0.02).result()
    (status, reported, _), streamed = whole.result(), fast.result()
    assert status == 200
    wanted = [one for output in llm.generate(PROMPTS, params) for one in output.outputs]
    if name == "any bytes":
        assert not all(one.text.isascii() for one in wanted)
    for i, one in enumerate(wanted):
        choice = reported["choices"][i]
        assert choice["text"] == text_of(streamed, i) == text_of(slow, i) == one.text
        reason = "stop" if one.finish_reason == "stop" else "length"
        assert (choice["finish_reason"], choice["stop_reason"]) == (reason, one.stop_reason)
    assert reported["usage"]["completion_tokens"] == sum(len(one.token_ids) for one in wanted)


def test_chat_is_the_template_and_a_completion(server):
    chat = server.chat(QUESTIONS[0], max_tokens=64)[1]
    answer = server.complete(PROMPTS[0], max_tokens=64)[1]
    assert chat["choices"][0]["message"]["content"] == answer["choices"][0]["text"]
    assert chat["choices"][0]["message"]["content"].endswith(" 40.")
    assert chat["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    details = server.chat(QUESTIONS[0], max_tokens=64, n=2)[1]["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] <= chat["usage"]["prompt_tokens"]


def test_log_probabilities_of_the_routes_are_those_of_an_llm(server):
    import dllm_jax as dj

    llm = dj.LLM("builtin:tiny-sdar", max_num_seqs=4, page_size=32, warm_up=False, logprobs=True)
    params = dj.SamplingParams(max_tokens=64, logprobs=2)
    (want,) = llm.generate(PROMPTS[:1], params)[0].outputs
    numbers = [pytest.approx(next(iter(one.values())), abs=1e-5) for one in want.logprobs]

    asked = {"max_tokens": 64, "logprobs": True, "top_logprobs": 2}
    (whole,) = server.chat(QUESTIONS[0], **asked)[1]["choices"]
    entries = whole["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == numbers
    written = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert written.decode() == whole["message"]["content"] == want.text
    for entry, said in zip(entries, want.logprobs, strict=True):
        assert [one["logprob"] for one in entry["top_logprobs"]] == pytest.approx(
            sorted(said.values(), reverse=True)[:2], abs=1e-5
        )
    turns = {"messages": [{"role": "user", "content": QUESTIONS[0]}]}
    events = server.events(CHAT, {**turns, **asked, "stream_mode": "denoise"})
    pieces = [e["choices"][0] for e in events if e["choices"]]
    said = [piece["logprobs"]["content"] for piece in pieces if piece["logprobs"]]
    assert [entry for content in said for entry in content] == entries
    cells = [cell for e in events if "diffusion" in e for cell in e["diffusion"]["set"]]
    assert cells
    assert all(0 <= prob <= 1 for _, _, prob in cells)

    legacy = server.complete(PROMPTS[0], max_tokens=64, logprobs=2)[1]["choices"][0]
    said = legacy["logprobs"]
    assert said["token_logprobs"] == numbers
    assert "".join(said["tokens"]) == legacy["text"] == want.text
    offsets = [*said["text_offset"], len(want.text)]
    assert [want.text[a:b] for a, b in itertools.pairwise(offsets)] == said["tokens"]
    assert [max(top.values()) for top in said["top_logprobs"]] == [
        pytest.approx(max(one.values()), abs=1e-5) for one in want.logprobs
    ]

    body = {"input": QUESTIONS[0], "max_output_tokens": 64}
    body["include"] = ["message.output_text.logprobs"]
    answer = server.post("/v1/responses", body)[1]
    (part,) = answer["output"][0]["content"]
    assert [entry["logprob"] for entry in part["logprobs"]] == numbers
    assert all(entry["top_logprobs"] == [] for entry in part["logprobs"])


@pytest.mark.parametrize("joint", [False, True])
def test_decisions_are_those_of_an_llm(server, llm, joint):
    choices = ["billing", "tech: outages"]
    wanted = llm.decide(
        "I was charged twice.",
        [Question.predicate("A double charge?"), Question.choice("Which team?", choices)],
        joint=joint,
    )
    asked = [
        {"type": "predicate", "instructions": "A double charge?"},
        {
            "type": "choice",
            "instructions": "Which team?",
            "choices": [{"value": "billing"}, {"value": "tech", "description": "outages"}],
        },
    ]
    body = {"input": "I was charged twice.", "questions": asked, "joint": joint}
    charge, team = server.post("/v1/decisions", body)[1]["answers"]
    assert charge["probability"] == pytest.approx(wanted[0].value, abs=1e-5)
    found = [one["probability"] for one in team["probabilities"]]
    assert found == pytest.approx(wanted[1].probabilities, abs=1e-5)


def test_seeds_of_any_size(server):
    fields = {"temperature": 1.0, "max_tokens": 32}
    for seed in (-1, 2**63 - 1):
        texts = [
            server.complete("hi", seed=one, **fields)[1]["choices"][0]["text"]
            for one in (seed, seed % 2**32)
        ]
        assert texts[0] == texts[1]


def test_frames_never_hold_settled_text(server):
    body = {"messages": [{"role": "user", "content": QUESTIONS[1]}], "max_tokens": 96}
    plain = text_of(server.events(CHAT, body))
    events = server.events(CHAT, {**body, "stream_mode": "denoise"})
    assert text_of(events) == plain
    frames = [event["diffusion"] for event in events if not event["choices"]]
    assert frames
    at = 0
    for frame in frames:
        assert frame["at"] >= at
        at = frame["at"]
        places = [place for place, _ in frame["set"]] + frame["clear"]
        assert all(at <= place for place in places)


def test_holes_within_the_first_window_are_filled_by_blocks(server, llm):
    """`max_tokens` before the suffix, and one for each mask token."""
    import dllm_jax as dj

    assert server.get("/v1/models")[1]["data"][0]["dllm"]["infill"] is True
    hole = llm.tokenizer.mask_token
    prompt, suffix = f"{PROMPTS[0]} Ben has {hole}{hole} dollars and", f" pens and {hole} books."
    params = dj.SamplingParams(max_tokens=3, ignore_eos=True)
    (wanted,) = llm.infill(prompt, suffix, params)
    fields = {"suffix": suffix, "max_tokens": 3, "ignore_eos": True}
    status, reported, _ = server.complete(prompt, **fields)
    assert (status, reported["choices"][0]["text"]) == (200, wanted.outputs[0].text)
    status, reported, _ = server.complete("a", suffix="b", max_tokens=400)
    assert (status, reported["error"]["param"]) == (400, "suffix")
    assert "use buffer_size=" in reported["error"]["message"]


def test_clients_that_leave_free_slots_and_pages(server):
    # A text of 400 forwards takes some 0.3 s: 512 of them are at work however late this looks.
    body = {"prompt": PROMPTS[0], "max_tokens": 400, "ignore_eos": True, "n": 128}
    body |= {"strategy_overrides": {"accept_threshold": 1.0}}
    for stream in (True, False):
        with contextlib.ExitStack() as held:
            for _ in range(4):
                held.enter_context(server.open(TEXT, {**body, "stream": stream}))
            assert within(lambda: server.metric("dllm_num_requests_running") == 4)  # it may compile
        assert within(lambda: server.metric("dllm_num_requests_running") == 0)
        assert server.metric("dllm_num_requests_waiting") == 0
        assert server.metric("dllm_kv_cache_usage_ratio") == 0


def test_many_clients_at_once(server):
    wanted = server.chat(QUESTIONS[0], max_tokens=64)[1]["choices"][0]["message"]["content"]
    body = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": 64}
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda _: text_of(server.events(CHAT, body)), range(12)))
    assert set(texts) == {wanted}
    assert server.metric("dllm_kv_cache_usage_ratio") == 0


def test_the_commands_of_the_page_work_as_printed(server):
    """Of docs/http.md, with the port of this server."""
    page = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")
    found = re.findall(r"^(curl .*?)(?=^curl|^```$)", page, re.MULTILINE | re.DOTALL)
    said = (b"ready", b"The answer is 497.", b"data: [DONE]", b"confidence")
    for command, wanted in zip(found, said, strict=True):
        shell = command.strip().replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
        done = subprocess.run(["bash", "-c", f"{shell} -sSf"], capture_output=True)
        assert wanted in done.stdout, done


@pytest.mark.slow("empty|flags0|flags2")
@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        (("nowhere",), 1, "does not exist"),
        (("builtin:tiny-sdar", "--strategy", "nope"), 2, "nope"),
        (("builtin:tiny-sdar", "--host", "192.0.2.1"), 2, "cannot be listened on"),
        (("builtin:tiny-sdar", "--api-key", " "), 2, "empty"),
        (("builtin:tiny-sdar", "--api-key", "k", "--allowed-origin", "*"), 2, "name the origins"),
    ],
)
def test_what_cannot_be_served_ends_with_one_line(flags, status, said):
    done = subprocess.run(
        [sys.executable, *command(*flags)], capture_output=True, text=True, timeout=120
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    errors = [line["said"] for line in lines if line["event"] == "error"]
    assert (done.returncode, len(errors)) == (status, 1), done.stderr
    assert said in errors[0]


def test_24_tools_are_called_in_stages_alone_and_together(server):
    def asked(i, **more):
        talk = [{"role": "user", "content": QUESTIONS[i]}]
        how = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 150}
        body = {"messages": talk, "tools": many_tools(), **how, **more}
        # The first one waits for programs to be compiled.
        status, answer, _ = server.request("POST", CHAT, body, timeout=900)
        assert status == 200, answer
        (choice,) = answer["choices"]
        calls = [one["function"] for one in choice["message"].get("tool_calls", ())]
        return choice["finish_reason"], calls

    alone = [asked(i) for i in range(2)]
    for finish, calls in alone:
        assert (finish, len(calls)) == ("tool_calls", 1)
        said = json.loads(calls[0]["arguments"])
        assert 0 <= said["n"] <= 99
        assert set(said) <= {"n", "kind"}
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(asked, range(2))] == alone
    # The arguments have no room: no call is delivered.
    assert asked(0, max_tokens=45) == ("length", [])
