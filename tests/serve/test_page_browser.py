"""Proves the page in headless Chromium: keys alone, screen readers, sizes, errors, a saved file.

The server is the scripted one (`scripted.py`): four words a step, and faults that a seed asks for.
"""

import json
import re
import shlex
import subprocess

import pytest

from dllm_jax.serve.examples import QUESTIONS
from tests.serve import browser as browsing
from tests.serve import scripted as script
from tests.serve.driving import gone, scripted, within

pytestmark = pytest.mark.long

MARKUP = "<img src=x onerror=alert(1)><b>bold</b>"
IDLE = "!live && document.querySelector('#figures dl')"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with scripted(tmp_path_factory.mktemp("server")) as one:
        yield one


@pytest.fixture
def tab(tmp_path):
    if browsing.find() is None:
        pytest.skip("no Chromium is installed")
    one = browsing.Browser(tmp_path / "profile")
    one.look()
    yield one
    one.close()


def visit(tab, server):
    tab.open(f"http://127.0.0.1:{server.port}/")
    tab.wait("model")


def setting(tab, name, value):
    said = json.dumps(str(value))
    tab.run(f"Object.assign(document.getElementById('{name}'), {{value: {said}}}).value")


def ask(tab, text="hi", until=IDLE, **settings):
    for name, value in {"most": 32, **settings}.items():
        setting(tab, name, value)
    tab.run("document.getElementById('prompt').focus()")
    tab.type(text)
    tab.press("Enter")
    tab.wait(until)


def words(tab):
    """What stands in the last answer at its step."""
    return tab.run("[...document.querySelectorAll('.lane .text')].at(-1).textContent")


def test_a_text_is_asked_for_watched_and_stepped_through_by_keys(tab, server):
    visit(tab, server)
    assert tab.run("document.activeElement.id") == "prompt"
    ask(tab, most=16, seed=script.SLEEPS)
    while tab.run("picked.marks.length") < 4:  # steps that came together are one: ask again
        visit(tab, server)
        ask(tab, most=16, seed=script.SLEEPS)
    tab.wait("picked.shown === 4 && !picked.isFollowing")
    whole = "".join(f"word{i} " for i in range(16))
    assert words(tab) == whole
    assert tab.run("document.querySelector('.window').hidden")
    for _ in range(25):
        tab.press("Tab", modifiers=browsing.SHIFT)
        if tab.run("document.activeElement.matches('.bar input[type=range]')"):
            break
    tab.press("Home", "ArrowRight")
    slider = tab.run("document.activeElement.getAttribute('aria-valuetext')")
    assert re.fullmatch(r"forward 1 of 4, 1 open", slider)
    assert words(tab) == "word0 word1 word2 word3 "
    assert tab.run("document.querySelector('.lane .fresh').textContent") == words(tab)
    assert tab.run("document.querySelectorAll('.window .cell').length") == 2
    assert tab.run("document.querySelectorAll('.window .hole').length") == 1
    tab.press("End")
    assert words(tab) == whole
    tab.press(" ")
    tab.wait("picked.isFollowing && picked.shown > 0")
    tab.press("Escape", "/")
    assert tab.run("document.activeElement.id") == "prompt"
    assert tab.problems == []


def test_the_empty_page_says_what_the_model_knows_and_asks_its_examples(tab, server):
    visit(tab, server)
    assert "solves word problems" in tab.run("document.getElementById('about').textContent")
    texts = tab.run("[...document.querySelectorAll('#examples button')].map(b => b.textContent)")
    assert texts == list(QUESTIONS)
    tab.run("document.querySelector('#examples button').click()")
    tab.wait(IDLE)
    assert tab.run("picked.run.turns[0].content") == texts[0]
    assert tab.run("document.getElementById('empty').hidden")
    assert tab.problems == []


def test_nothing_is_asked_of_another_host(tab, server):
    visit(tab, server)
    ask(tab)
    own = f"http://127.0.0.1:{server.port}/"
    assert len(tab.requests) >= 6
    assert {one for one in tab.requests if not one.startswith((own, "data:"))} == set()
    assert tab.problems == []


@pytest.mark.parametrize("width", [1200, 768, 360])
@pytest.mark.parametrize("still", [False, True])
def test_every_width_fits(tab, server, width, still):
    tab.look(width=width, height=740, still=still)
    visit(tab, server)
    tab.run("document.getElementById('beside').checked = true")
    ask(tab, until="!live && picked && picked.isDone")
    wide = "document.documentElement.scrollWidth > innerWidth"
    assert not tab.run(wide)
    if still:  # nothing plays unasked
        assert tab.run("picked.shown === picked.marks.length - 1 && !picked.isFollowing")
    small = """[...document.querySelectorAll('button, textarea, #talk input[type=range]')]
      .filter((one) => one.checkVisibility()).map((one) => one.getBoundingClientRect())
      .filter((box) => box.height < 44 || box.width < 44).length"""
    assert tab.run(small) == 0
    tops = tab.run(
        "[...document.querySelectorAll('.lane')].map((one) => one.getBoundingClientRect().top)"
    )
    assert len(tops) == 2
    assert (tops[0] == tops[1]) is (width > 360)
    if width < 860:
        tab.run("document.getElementById('more').focus()")
        tab.press("Enter")
        assert tab.run("document.getElementById('side').checkVisibility()")
        assert not tab.run(wide)
        tab.press("Escape")
        assert not tab.run("document.getElementById('side').checkVisibility()")
        assert tab.run("document.activeElement.id") == "more"


def test_a_screen_reader_gets_settled_text_and_names(tab, server):
    visit(tab, server)
    ask(tab, "one\ntwo. three")
    log = "document.querySelector('[role=log][aria-live=polite]').textContent.trim()"
    tab.wait(f"{log}.length")
    assert tab.run(log).endswith("word31")
    assert tab.run("document.querySelector('.window .cells').getAttribute('aria-hidden')") == "true"
    roles = tab.tree()
    named = ("button", "textbox", "slider", "spinbutton", "checkbox", "radio", "log", "main")
    assert {role for role, _ in roles} >= {*named}
    assert [(role, name) for role, name in roles if role in named and not name.strip()] == []


def test_texts_are_never_markup(tab, server):
    visit(tab, server)
    ask(tab, MARKUP)
    assert tab.run("document.querySelector('.turn .text').textContent") == MARKUP
    assert tab.run("document.querySelectorAll('#talk img, #talk p b').length") == 0
    tab.run("hear(picked.run.lanes[0], {choices: [{text: '<i>x</i></script>'}]}), picked.draw()")
    assert tab.run("document.querySelectorAll('#talk i, #talk script').length") == 0


def test_escape_stops_and_the_slot_is_free(tab, server):
    visit(tab, server)
    ask(tab, seed=script.HANGS, until="live && document.querySelector('.window:not([hidden])')")
    assert tab.run("document.getElementById('send').textContent") == "Stop"
    tab.press("Escape")
    tab.wait("!live && document.querySelector('.answer .who').textContent.includes('stopped')")
    assert words(tab).startswith("word0 ")
    assert within(lambda: server.metric("dllm_num_requests_running") == 0)
    assert tab.run("turns.length") == 2  # what had settled goes on in the conversation


def test_errors_are_told_in_words(tab, server):
    visit(tab, server)
    fault = "[...document.querySelectorAll('.fault')].at(-1)"
    shown = f"!live && {fault} && {fault}.checkVisibility()"
    for seed, reported in (
        (script.REFUSED, "take another seed"),
        (script.FAILS, "the server failed"),
    ):
        ask(tab, seed=seed, until=shown)
        assert reported in tab.run(f"{fault}.textContent")
        assert tab.run(f"{fault}.getAttribute('role')") == "alert"
        setting(tab, "prompt", "")
    assert tab.run("turns.length") == 2  # of the refused one nothing is kept
    bars = "[...document.querySelectorAll('.bar')].map((one) => one.checkVisibility())"
    assert tab.run(bars) == [False, True]  # there is nothing to replay
    setting(tab, "most", 0)
    tab.type("x")
    tab.press("Enter")
    assert tab.run("!live && document.querySelectorAll('.answer').length") == 2


def test_a_dead_engine_is_told(tab, tmp_path_factory):
    with scripted(tmp_path_factory.mktemp("own")) as server:
        visit(tab, server)
        fault = "document.querySelector('.fault')"
        ask(tab, seed=script.DIES, until=f"!live && {fault} && {fault}.checkVisibility()")
        assert re.search("engine|connection", tab.run(f"{fault}.textContent"))
        assert within(lambda: gone(server.process.pid))
        tab.run("document.getElementById('prompt').focus()")
        ask(tab, until="[...document.querySelectorAll('.fault')].length === 2 && !live")
        tab.wait("[...document.querySelectorAll('.fault')].at(-1).checkVisibility()")
        assert "does not answer" in tab.run("document.querySelectorAll('.fault')[1].textContent")


@pytest.fixture
def mine(tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    with scripted(folder, api_keys=["sécret"], limits={"max_denoise_streams": 0}) as server:
        yield server


def test_a_key_is_asked_for_by_browser_and_page(tab, mine):
    tab.send("Fetch.enable", handleAuthRequests=True)
    tab.open(f"http://127.0.0.1:{mine.port}/")
    assert tab.challenges == ["basic"]
    assert "API key" in tab.run("document.body.textContent")
    tab.credentials = ("anyone", "sécret")
    visit(tab, mine)
    assert tab.run("document.documentElement.dataset.key") == "yes"
    # A key that the browser sends no more: the page asks itself.
    tab.run("key = 'old', void loadModel().then(() => { globalThis.loaded = true; })")
    tab.wait("document.getElementById('key-box').open")
    assert "refused that key" in tab.run("document.getElementById('key-told').textContent")
    tab.type("sécret")
    tab.press("Enter")
    tab.wait("globalThis.loaded && !document.getElementById('key-box').open && key === 'sécret'")
    # No window is to be had here: the text comes all the same.
    ask(tab)
    tab.run("picked.finish()")
    assert words(tab).endswith("word31 ")
    assert "settled text alone" in tab.run("document.querySelector('.lane .note').textContent")


def test_curl_repeats_the_answer(tab, server):
    visit(tab, server)
    ask(tab, 'it\'s "this"\n$HOME', seed=7)
    tab.run("""Object.defineProperty(navigator, 'clipboard', {configurable: true,
      value: {writeText: async (text) => { copied = text; }}})""")
    tab.run("document.querySelectorAll('.acts button')[1].click()")
    tab.wait("globalThis.copied")
    command = tab.run("copied")
    assert '"seed":7' in command
    assert "Authorization" not in command
    assert shlex.split(command)[0] == "curl"
    done = subprocess.run(
        ["bash", "-c", command.replace("curl ", "printf '%s\\n' ", 1)],
        capture_output=True,
        text=True,
        check=True,
    )
    *_, data = done.stdout.split("-d\n")
    tab.run("picked.finish()")
    body = json.loads(data)
    assert body["messages"][-1]["content"] == 'it\'s "this"\n$HOME'
    assert server.post("/v1/chat/completions", body)[1]["choices"][0]["message"]["content"] == (
        words(tab)
    )
    # Where there is no clipboard the command stands in a box.
    tab.run("Object.defineProperty(navigator, 'clipboard', {configurable: true, value: undefined})")
    tab.run("document.querySelectorAll('.acts button')[1].click()")
    tab.wait("document.getElementById('copy-box').open")
    assert tab.run("document.getElementById('copy-text').value") == command


def test_a_saved_page_replays_alone(tab, server):
    visit(tab, server)
    tab.run("document.getElementById('beside').checked = true")
    ask(tab, MARKUP + "</script>", seed=7)
    tab.run("document.querySelectorAll('.acts button')[0].click()")
    assert within(lambda: list(tab.files.glob("*.html")))
    (saved,) = tab.files.glob("*.html")
    assert saved.name == "denoise-7.html"
    assert saved.stat().st_size < 200_000
    tab.requests.clear()
    tab.open(saved.as_uri())
    tab.wait("document.querySelector('.answer')")
    assert {one for one in tab.requests if not one.startswith(("file:", "data:"))} == set()
    assert tab.run("document.querySelector('.turn .text').textContent") == MARKUP + "</script>"
    assert words(tab) == ""  # it opens before the first step
    tab.run("document.querySelector('.bar input').focus()")
    tab.press("End")
    assert words(tab).endswith("word31 ")
    assert tab.run("document.querySelectorAll('.lane').length") == 2
    assert "tokens per forward" in tab.run("document.getElementById('figures').textContent")
    tab.look(width=360, height=740, dark=True)
    assert not tab.run("document.documentElement.scrollWidth > innerWidth")
    assert tab.problems == []


def test_thresholds_go_with_the_message(tab, server):
    visit(tab, server)
    tab.run("document.querySelector('.threshold input[type=range]').focus()")
    tab.press("ArrowLeft")
    assert tab.run("document.querySelector('.threshold input[type=number]').value") == "0.89"
    ask(tab)
    sent = tab.run("picked.run.lanes[0].body.strategy_overrides")
    assert sent == {"accept_threshold": 0.89}
    tab.run("document.getElementById('usual').click()")
    ask(tab, until="document.querySelectorAll('.answer').length === 2 && !live")
    assert "strategy_overrides" not in tab.run("picked.run.lanes[0].body")
    assert tab.run("picked.run.lanes[0].body.messages.length") == 3


def _call(name, **arguments):
    said = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{said}\n</tool_call>"


def test_tools_are_offered_and_their_results_sent(tab, tmp_path):
    """Each call is a card, thoughts are folded, and the next turn has calls and results."""
    calls = _call("get_weather", city=MARKUP, days=2) + "\n" + _call("add", a=1, b=2)
    replies = [f"<think>\nhm\n</think>\n\nI look.\n{calls}", "21 degrees.", "Yes."]
    folder = tmp_path / "server"
    folder.mkdir()
    with scripted(folder, settings={"replies": replies, "chat_template": script.THINKS}) as server:
        visit(tab, server)
        for label in ("Weather", "Sum"):
            tab.run(f"[...samples.children].find(b => b.textContent === '{label}').click()")
        choices = tab.run("[...choice.options].map(o => o.textContent)")
        assert choices == ["auto", "required", "none", "only get_weather", "only add"]
        ask(tab, most=400, until="!live && document.querySelector('.results')")
        tab.run("picked.finish()")
        cards = tab.run("[...document.querySelectorAll('.call')].map(c => c.innerText)")
        assert [card.split("\n")[0] for card in cards] == ["get_weather", "add"]
        assert MARKUP in cards[0]
        assert all("held to its schema" in card for card in cards)
        assert words(tab) == "I look."
        assert not tab.run("document.querySelector('.thoughts').open")
        assert re.fullmatch(
            r"Thoughts · \d+ tokens",
            tab.run("document.querySelector('.thoughts summary').innerText"),
        )
        tab.run("document.querySelectorAll('.results textarea')[0].value = '21'")
        tab.run("document.querySelector('.results .main').click()")
        tab.wait("!live && turns.length === 5")
        roles = tab.run("turns.map(turn => turn.role)")
        assert roles == ["user", "assistant", "tool", "tool", "assistant"]
        assert tab.run("turns[1].tool_calls.map(c => c.id)") == tab.run(
            "turns.slice(2, 4).map(t => t.tool_call_id)"
        )
        assert tab.run("turns.at(-1).content") == "21 degrees."
        told = {"nfe": 1, "at": 0, "size": 3, "set": [[0, "{"], [1, "a"]], "clear": []}
        tab.run(f"window.l = newLane('', {{}}); hear(l, {{diffusion: {json.dumps(told)}}})")
        told |= {"nfe": 2, "set": [[2, "b"]]}
        ends = {"diffusion": told, "dllm": {"forced": [0, 2]}}
        tab.run(f"hear(l, {json.dumps(ends)})")
        tab.run("window.a = new Answer({...picked.run, lanes: [l]}); a.show(2)")
        kinds = tab.run("[...a.box.querySelectorAll('.cell')].map(c => c.className)")
        assert kinds == ["cell forced", "cell", "cell new forced"]
        tab.run("tools.value = '[{}]'")
        tab.run("showChoices()")
        assert not tab.run("tools.checkValidity()")
        assert tab.problems == []
