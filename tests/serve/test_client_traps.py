"""Proves that each trap of real clients is closed, and that a server which has it is noticed.

A twin is a copy of `dllm_jax.serve` with one expression replaced, run with the scripted engine. Its
check must fail; the same check passes on the unbroken server. Two traps need no twin here: raw
tokenizer calls (`test_wire.test_no_raw_tokenizer_encodes` has its own), and detokenising in the
front, which has no `TextStream` to do it with.
"""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.serve import test_http
from tests.serve.driving import CHAT, PATIENCE_S, ROOT, TEXT, scripted

pytestmark = pytest.mark.long

USER = {"role": "user", "content": "hi"}


def check_neutral_fields(server):
    fields = {"min_p": None, "repetition_penalty": 1.0, "presence_penalty": 0, "tools": []}
    assert server.chat(max_tokens=4, **fields)[0] == 200


def check_messages(server):
    turns = [
        {"role": "developer", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None},
        USER,
    ]
    assert server.post(CHAT, {"messages": turns, "max_tokens": 4})[0] == 200


def check_values(server):
    for seed in (-5, 2**63 - 1):
        body = {"top_k": -1, "seed": seed, "stop": [], "n": None, "max_tokens": 4}
        assert server.chat(**body)[0] == 200
    assert server.chat(top_k=0, max_tokens=4)[0] == 200


def check_one_request_id(server, patience_s=PATIENCE_S):
    body, headers = {"messages": [USER], "max_tokens": 400}, {"x-request-id": "same"}
    with ThreadPoolExecutor(2) as pool:
        answers = pool.map(
            lambda _: server.request("POST", CHAT, body, headers, patience_s), range(2)
        )
        assert [one[0] for one in answers] == [200, 200]


def check_hostile_json(server):
    for body in (b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "\\ud800"}', b"[" * 100_000):
        status, reported, _ = server.post(TEXT, body)
        assert (status, reported["error"]["code"]) == (400, "invalid_json")


def check_causal(server):
    assert b"vllm:diffusion" not in server.get("/metrics")[1]


CHECKS = {
    "test_stream_lines_are_data_only": lambda server: test_http.test_stream_lines_are_data_only(
        server, "denoise"
    ),
    "test_usage_is_last_and_alone": test_http.test_usage_is_last_and_alone,
    "test_error_event": test_http.test_error_event,
    "test_models_entry": test_http.test_models_entry,
    "test_methods": test_http.test_methods,
    "test_fields_that_change_nothing": check_neutral_fields,
    "test_messages_as_clients_write_them": check_messages,
    "test_values_of_other_servers_clients": check_values,
    "test_two_clients_with_one_request_id": check_one_request_id,
    "test_hostile_json": check_hostile_json,
    "test_nothing_is_divided_by_for_ar": check_causal,
}
EVENT = 'return b"data: " + _json(content) + b"\\n\\n"'
DATA_ONLY, MESSAGES = "test_stream_lines_are_data_only", "test_messages_as_clients_write_them"
VALUES = "test_values_of_other_servers_clients"
# Trap -> check, file, expression, what replaces it.
TWINS = {
    "event_line": (DATA_ONLY, "stream.py", EVENT, EVENT.replace('b"data', 'b"event: x\\ndata')),
    "id_line": (DATA_ONLY, "stream.py", EVENT, EVENT.replace('b"data', 'b"id: 1\\ndata')),
    "crlf": (DATA_ONLY, "stream.py", EVENT, EVENT.replace("\\n\\n", "\\r\\n\\r\\n")),
    "null_is_refused": (
        "test_fields_that_change_nothing",
        "wire.py",
        "elif value is None or (name",
        "elif (name",
    ),
    "neutral_is_refused": (
        "test_fields_that_change_nothing",
        "wire.py",
        "if not _changes_nothing(value, neutral[name]):",
        "if True:",
    ),
    "no_developer": (MESSAGES, "wire.py", '"system", "developer", "user"', '"system", "user"'),
    "no_text_parts": (
        MESSAGES,
        "wire.py",
        "content: str | list[Part]\n    name",
        "content: str\n    name",
    ),
    "echoed_nulls": (
        MESSAGES,
        "wire.py",
        'f"{path}.")\n    content',
        'f"{path}.") | turn\n    content',
    ),
    "no_root": ("test_models_entry", "reading.py", '"root": facts.source,', ""),
    "usage_with_a_choice": (
        "test_usage_is_last_and_alone",
        "answers.py",
        '"choices": [],\n            "usage"',
        '"choices": [{"index": 0}],\n            "usage"',
    ),
    "top_k_minus_1": (
        VALUES,
        "wire.py",
        '_in("top_k")] | None = None\n    n:',
        '_in("max_tokens")] | None = None\n    n:',
    ),
    "large_seeds": (VALUES, "generating.py", "body.seed % SEED_MODULUS", "body.seed"),
    "ids_of_callers": (
        "test_two_clients_with_one_request_id",
        "client.py",
        "box = Mailbox(next(self._ids),",
        "box = Mailbox(7,",
    ),
    "error_without_done": (
        "test_error_event",
        "stream.py",
        "return event(failure.body) + DONE",
        "return event(failure.body)",
    ),
    "lax_json": (
        "test_hostile_json",
        "wire.py",
        "content = msgspec.json.decode(data)",
        'content = __import__("json").loads(data)',
    ),
    "redirects": ("test_methods", "app.py", "redirect_slashes=False", "redirect_slashes=True"),
    "diffusion_of_ar": (
        "test_nothing_is_divided_by_for_ar",
        "metrics.py",
        "or facts is None or facts.causal:",
        "or facts is None:",
    ),
}


def settings_of(check):
    return {"settings": {"causal": True}} if check is check_causal else {}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with scripted(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.mark.parametrize("name", [name for name in CHECKS if CHECKS[name] is not check_causal])
def test_a_trap_is_closed(server, name):
    CHECKS[name](server)


@pytest.mark.slow
def test_the_trap_of_a_causal_model_is_closed(tmp_path):
    with scripted(tmp_path, **settings_of(check_causal)) as server:
        check_causal(server)


@pytest.mark.slow
@pytest.mark.parametrize("trap", TWINS)
def test_a_twin_with_the_trap_is_noticed(tmp_path, trap):
    name, file, old, new = TWINS[trap]
    root = copy_of_tree(tmp_path / "tree")
    path = root / "dllm_jax" / "serve" / file
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {file}"
    path.write_text(text.replace(old, new), encoding="utf-8")
    noticed = pytest.raises((AssertionError, LookupError, TimeoutError, TypeError, ValueError))
    with scripted(tmp_path, root=root, **settings_of(CHECKS[name])) as server, noticed:
        if CHECKS[name] is check_one_request_id:
            check_one_request_id(server, 5)  # one of the two is never answered
        CHECKS[name](server)


def copy_of_tree(root):
    """The project with a copy of `dllm_jax/serve`, and links to the rest."""
    (root / "dllm_jax").mkdir(parents=True)
    for path in [*ROOT.iterdir(), *(ROOT / "dllm_jax").iterdir()]:
        place = root / path.relative_to(ROOT)
        if path.name not in ("dllm_jax", "serve", "__pycache__", ".git"):
            place.symlink_to(path.resolve())
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "dllm_jax" / "serve", root / "dllm_jax" / "serve", ignore=ignored)
    return root
