"""Proves that keys of a file are read strictly, and that each is held to its own limits."""

import pytest

from dllm_jax.cli.entry import parse
from dllm_jax.cli.errors import UsageError
from dllm_jax.cli.serve import config_of
from dllm_jax.serve.keys import Key, Quotas, read_keys
from dllm_jax.serve.refusals import Refusal
from tests.serve.driving import CHAT, scripted, within


def test_a_file_of_keys():
    text = "# people\n\nann sécret texts=2 tokens_per_minute=60\nbob other compile_s_per_minute=3\n"
    ann, bob = read_keys(text)
    assert ann == Key("ann", "sécret", texts=2, tokens_per_minute=60)
    assert (bob.name, bob.waiting, bob.compile_s_per_minute) == ("bob", None, 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no key"),
        ("ann", "line 1"),
        ("1 secret", "line 1"),
        ("ann secret\nann other", "line 2"),
        ("ann secret\nbob secret", "line 2"),
        ("ann secret texts", "line 1: word 3"),
        ("ann secret texts=2 texts=3", "line 1: word 4"),
        ("ann secret texts=-1", "line 1: word 3"),
        ("ann secret tokens=1", "line 1: word 3"),
    ],
)
def test_lines_that_are_none_are_refused_without_the_key(text, said):
    with pytest.raises(ValueError, match=said) as raised:
        read_keys(text)
    assert "secret" not in str(raised.value)


def _quotas(**limits):
    clock, refused = [0.0], []
    key = Key("ann", "secret", **limits)
    told = lambda *words: refused.append(words)  # noqa: E731
    return Quotas([key], told, lambda: clock[0]), clock, refused


def _refusal(quotas, *numbers, client="key ann"):
    try:
        quotas.check(client, *numbers)
    except Refusal as error:
        return error.status, error.code, error.headers.get("retry-after")
    return None


@pytest.mark.parametrize(
    ("limits", "numbers", "status"),
    [
        ({"texts": 2}, (1, 1, 9), None),
        ({"texts": 2}, (1, 2, 9), 429),
        ({"texts": 2}, (3, 0, 9), 400),
        ({"waiting": 0}, (2, 1, 3), None),
        ({"waiting": 0}, (2, 2, 3), 429),
        ({"waiting": 1}, (2, 2, 3), None),
        ({}, (9, 9, 0), None),
    ],
)
def test_texts_of_a_key_at_once(limits, numbers, status):
    quotas, _, refused = _quotas(**limits)
    found = _refusal(quotas, *numbers)
    assert (found and found[0]) == status
    assert refused == ([("ann", next(iter(limits)))] if status == 429 else [])
    assert _refusal(quotas, *numbers, client="key 0") is None


@pytest.mark.parametrize("limit", ["tokens_per_minute", "compile_s_per_minute"])
def test_what_a_key_uses_comes_back_within_a_minute(limit):
    quotas, clock, _ = _quotas(**{limit: 60})
    quotas.spend("key ann", limit, 70)  # more than there was: known at the end
    assert _refusal(quotas, 1, 0, 1) == (429, "key_limit", "11")
    clock[0] += 11
    assert _refusal(quotas, 1, 0, 1) is None
    clock[0] += 1000
    quotas.spend("key ann", limit, 61)  # a minute's worth at most is kept
    assert _refusal(quotas, 1, 0, 1) == (429, "key_limit", "2")


def test_a_named_key_over_http(tmp_path):
    keys = [["ann", "secret", None, None, 30], ["bob", "other"]]
    with scripted(tmp_path, keys=keys, isolate_prefix_cache=True) as server:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}
        own, other = ({"authorization": f"Bearer {key}"} for key in ("secret", "other"))
        assert server.post(CHAT, body)[0] == 401
        assert server.post(CHAT, body, own)[0] == 200
        status, told, headers = server.post(CHAT, body, own)
        assert (status, told["error"]["code"]) == (429, "key_limit")
        assert 1 <= int(headers["retry-after"]) <= 60
        status, told, _ = server.post("/v1/messages", body, {"x-api-key": "secret"})
        assert (status, told["error"]["type"]) == (429, "rate_limit_error")
        assert server.post(CHAT, body, other)[0] == 200
        text = server.request("GET", "/metrics", headers=other)[1].decode()
        assert 'key="ann",limit="tokens_per_minute"} 2' in text
        names = [None, "ann", "ann", "ann", "bob"]
        assert within(lambda: [line.get("key") for line in server.lines("request")] == names)
        assert "cret" not in server.log.read_text()


def test_keys_of_the_command_line(tmp_path):
    path = tmp_path / "keys"
    path.write_text("ann secret texts=2\n")

    def made(*words):
        return config_of(parse(["serve", "builtin:tiny-sdar", *words]))

    config = made("--key-file", str(path), "--isolate-prefix-cache", "--api-key", "other")
    assert (config.keys, config.has_keys) == ((Key("ann", "secret", texts=2),), True)
    assert config.isolate_prefix_cache
    for words, said in (
        (["--isolate-prefix-cache"], "give --key-file"),
        (["--key-file", str(path), "--api-key", "secret"], "one of --api-key, too"),
        (["--key-file", str(path), "--allowed-origin", "*"], "name the origins"),
        (["--key-file", str(tmp_path / "none")], "none"),
    ):
        with pytest.raises(UsageError, match=said):
            made(*words)
