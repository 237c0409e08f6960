"""Proves what the page at `/` promises without a browser: who gets it, its policy, its colours."""

import asyncio
import re

import pytest

from dllm_jax.serve import page
from dllm_jax.serve.app import application
from dllm_jax.serve.pipe import Launch
from dllm_jax.serve.service import Config, Service
from tests.trace.test_page import contrast

FOLDER = {name: bytes(page.asset(name, False).body).decode() for name in page.FILES}
SCRIPTS = FOLDER["page.js"] + FOLDER["replay.js"]


def get(path, accept="text/html,*/*;q=0.8", **settings):
    """Status, headers and body of an answer by the application alone: no engine is started."""
    service = Service(Config(model="m", launch=Launch("", {}), version="0", **settings))
    sent = []

    async def receive():
        return {"type": "http.request", "body": b""}

    async def send(message):
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"accept", accept.encode())]
    scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode()}
    scope |= {"query_string": b"", "headers": headers, "root_path": "", "http_version": "1.1"}
    asyncio.run(application(service)(scope, receive, send))
    start, *bodies = sent
    reported = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], reported, b"".join(part.get("body", b"") for part in bodies)


def test_browsers_get_the_page_and_clients_the_routes():
    status, headers, body = get("/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert body.decode() == FOLDER["page.html"]
    for accept in ("*/*", "application/json", ""):
        status, headers, body = get("/", accept)
        assert (status, headers["content-type"]) == (200, "application/json")
        assert b"POST /v1/completions" in body
        assert headers["vary"] == "accept"


def test_the_files_are_served_and_no_others():
    for name, kind in page.FILES.items():
        status, headers, body = get(f"/page/{name}")
        assert (status, body.decode()) == (200, FOLDER[name])
        assert headers["content-type"].startswith(kind)
        assert headers["x-content-type-options"] == "nosniff"
    for name in ("__init__.py", "nope", "..", "../app.py", "%2e%2e"):
        assert get(f"/page/{name}")[0] == 404


def test_the_page_needs_the_key_too():
    for path in ("/", "/page/page.js"):
        assert get(path, api_keys=("k",))[0] == 401


def test_the_policy_lets_nothing_in_from_elsewhere():
    policy = get("/")[1]["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["frame-ancestors"] == rules["form-action"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    html, style = FOLDER["page.html"], FOLDER["page.css"]
    assert not re.search(r"<script[^>]*>[^<]|<style|\son\w+=|\sstyle=", html)
    assert not re.search(r"https?:|//\w", html + style)
    assert "url(" not in style
    assert "@import" not in style


def test_no_text_becomes_markup():
    writes = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\("
    assert not re.search(writes, SCRIPTS)


def test_a_saved_script_cannot_end_early():
    assert "</" not in FOLDER["replay.js"]
    assert "</" not in FOLDER["page.css"]


@pytest.mark.parametrize("theme", [0, 1])
def test_contrast(theme):
    pairs = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", FOLDER["page.css"])
    found = {name: bytes.fromhex(both[theme][1:]) for name, *both in pairs}
    assert {"page", "ink", "soft", "guess", "fresh", "fault"} <= found.keys()
    for front, back in (("guess", "guess-tint"), ("fresh", "fresh-tint"), ("soft", "panel")):
        assert contrast(found[front], found[back]) >= 4.5
    for front in ("ink", "soft", "frame", "fault", "guess", "fresh"):
        assert contrast(found[front], found["page"]) >= 4.5
    assert contrast(found["page"], found["frame"]) >= 4.5  # the letters of Send


def test_provisional_and_settled_differ_in_form_too():
    style = FOLDER["page.css"]
    assert re.search(r"\.cell \{[^}]*underline dotted", style)
    assert re.search(r"\.fresh \{[^}]*underline solid", style)


def test_nothing_moves_but_the_steps():
    assert not re.search(r"transition|animation|scroll-behavior", FOLDER["page.css"])
    assert "(prefers-reduced-motion: reduce)" in FOLDER["replay.js"]
