"""Proves what the page of `dllm-jax trace` promises its reader.

The first half reads the page and its files as text: order, words, signs, contrast, the data of
several strategies. The second half drives the page in Chromium, where one is installed: keyboard,
address, and that nothing of the future is shown.
"""

import dataclasses
import itertools
import json
import re
from importlib import resources

import numpy as np
import pytest

from dllm_jax.cli import main
from dllm_jax.trace.page import page_facts, render_page
from dllm_jax.trace.trajectory import Trajectory
from tests.serve import browser
from tests.trace.test_trace import Tokenizer, step, window

ASSETS = {
    kind: (resources.files("dllm_jax.trace") / f"page.{kind}").read_text(encoding="utf-8")
    for kind in ("html", "css", "js")
}
END = 8
MARKUP = "</script><script>document.title='broken'</script>"
TEXTS = ("zero", " one", " two", " three", " four", " five", " six", ".", "<|end|>", MARKUP)


TOKENIZER = Tokenizer(TEXTS, {END})


def decoded(name, windows):
    """A trajectory over blocks of four; `windows` lists the cells before and after each step."""
    steps = []
    for before, after in itertools.pairwise(windows):
        was, now = np.asarray(before).reshape(2, 4), np.asarray(after).reshape(2, 4)
        said = np.stack([np.maximum(now, 0), np.where(now < 0, 0.25, 0.95)], axis=-1)
        settled = int(np.argmin(np.append(now.ravel(), -1) >= 0))
        steps.append(step(window(4, [1, 1], was), window(4, [1, 1], now), said, settled=settled))
    tokens = [one for one in windows[-1] if one != END]
    return Trajectory(
        [MARKUP_ID, 1, 2, 3], tokens, 99, "stop", "a model", name, {"block_size": 4}, steps
    )


MARKUP_ID = len(TEXTS) - 1
FINAL = [1, 2, 3, 4, 5, 7, END, END]
FAST = decoded("fast", [[-1] * 8, [1, 2, -1, 6, -1, -1, -1, END], FINAL])
SLOW = decoded("slow", [[-1] * 8, *([*FINAL[:n], *[-1] * (8 - n)] for n in (1, 2, 4, 6)), FINAL])


def page_of(*trajectories):
    return render_page(trajectories if len(trajectories) > 1 else trajectories[0], TOKENIZER)


def variables(style, theme):
    """The colours of a theme: name -> (red, green, blue)."""
    light, dark = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    found = dict(re.findall(r"--(\w+): #([0-9a-f]{6})", light))
    found |= dict(re.findall(r"--(\w+): #([0-9a-f]{6})", dark)) if theme == "dark" else {}
    return {name: tuple(bytes.fromhex(value)) for name, value in found.items()}


def contrast(one, other):
    """The contrast ratio of WCAG 2: 21 is black on white."""

    def luminance(colour):
        parts = [value / 255 for value in colour]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


# --- the page as text -----------------------------------------------------------------------------


def test_prompt_is_open():
    assert '<details id="prompt-box" open>' in page_of(FAST)


def test_the_blocks_are_above_the_legend():
    page = ASSETS["html"]
    assert page.index('id="prompt-box"') < page.index('class="board"') < page.index('id="legend"')


def test_forward_and_window_have_one_line_each():
    words = dict(re.findall(r"<dt>(\w+):</dt><dd>(.*?)</dd>", ASSETS["html"]))
    assert {"Forward", "Window"} <= words.keys()
    assert words["Forward"].startswith("one run of the model")
    assert max(map(len, words.values())) < 110


def test_no_sign_has_two_meanings():
    buttons = re.findall(r"<button[^>]*>(.*?)</button>", ASSETS["html"])
    states = re.findall(r'"([^"]+)"', re.search(r"const STATES = .*", ASSETS["js"])[0])
    marks = re.findall(r'"(.)"', re.search(r"const MARKS = .*", ASSETS["js"])[0])
    assert len(buttons) == 6
    assert len(states) == 4
    # Buttons and states are words, so that signs are left to the cells.
    assert all(re.fullmatch(r"[A-Za-z ]+", word) for word in buttons + states)
    spaces = re.findall(r'"?(\S)"?: "', re.search(r"const SPACES = .*", ASSETS["js"])[0])
    signs = [*marks, *spaces]
    assert len(set(signs)) == len(signs) == 6
    light = variables(ASSETS["css"], "light")
    kinds = [light[name] for name in ("frame", "focus", "new", "edit")]
    assert len(set(kinds)) == 4


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast_of_text_that_may_still_change(theme):
    found = variables(ASSETS["css"], theme)
    rule = re.search(r"#ahead[^{]*\{([^}]*)\}", ASSETS["css"])[1]
    assert "color: var(--soft)" in rule
    assert "opacity" not in rule
    assert contrast(found["soft"], found["page"]) >= 4.5
    assert contrast(found["soft"], found["panel"]) >= 4.5
    for colour in ("p0", "p1", "p2", "p3", "p4", "none", "panel"):
        assert contrast(found["ink"], found[colour]) >= 4.5


def test_cells_have_roles_and_labels():
    script, page = ASSETS["js"], ASSETS["html"]
    assert 'class="board" role="listbox"' in page
    assert '<p id="details" aria-live="polite">' in page
    assert 'setAttribute("role", "option")' in script
    for name in ("aria-label", "aria-selected"):
        assert f'cell.setAttribute("{name}"' in script


def test_page_follows_the_reader_s_settings():
    style = ASSETS["css"]
    assert "@media (prefers-color-scheme: dark)" in style
    still, moving = style.split("@media (prefers-reduced-motion: no-preference)")
    assert "transition" not in still
    assert "animation" not in style
    assert "transition" in moving


def test_one_strategy_is_one_object_and_several_are_a_list():
    def data(page):
        return json.loads(re.search(r'id="data">(.*?)</script>', page)[1])

    one, fast, slow = (data(page_of(*made)) for made in ([FAST], [FAST, SLOW], [SLOW, FAST]))
    facts = [json.loads(json.dumps(page_facts(made, TOKENIZER))) for made in (FAST, SLOW)]
    assert one == facts[0]
    assert fast == facts
    assert slow == facts[::-1]
    assert "fast and slow" in re.search(r"<title>(.*?)</title>", page_of(FAST, SLOW))[1]
    assert render_page([FAST], TOKENIZER) == page_of(FAST)


def test_several_strategies_have_one_prompt():
    other = dataclasses.replace(SLOW, prompt=[1, 2, 3, 4])
    with pytest.raises(ValueError, match="have 2 prompts; give those of one prompt"):
        render_page([FAST, other])
    with pytest.raises(ValueError, match="have 0 prompts"):
        render_page([])


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_command_puts_two_strategies_side_by_side(random_folder, capsys, tmp_path):
    out = tmp_path / "two.html"
    specs = ("multi_bd,accept_threshold=0.02", "block_diffusion,accept_threshold=0.5")
    flags = [part for spec in specs for part in ("--strategy", spec)]
    argv = ["trace", "How many pages?", "--model", str(random_folder), "--max-tokens", "16"]
    assert main([*argv, *flags, "--out", str(out)]) == 0
    reported = capsys.readouterr().out
    data = json.loads(re.search(r'id="data">(.*?)</script>', out.read_text("utf-8"))[1])
    assert [one["strategy"] for one in data] == list(specs)
    assert [one["settings"]["accept_threshold"] for one in data] == [0.02, 0.5]
    assert data[0]["prompt"] == data[1]["prompt"]
    for spec, one, line in zip(specs, data, reported.splitlines(), strict=True):
        assert line.startswith(f"{out}, {spec}: {one['numTokens']} tokens, ")
        assert f" {one['frames'][-1]['nfe']} forwards, " in line


@pytest.mark.parametrize(
    ("argv", "reported"),
    [
        (["--json"], "several strategies stand on one page; use --out FILE.html"),
        (["--out", "a.png"], "several strategies stand on one page"),
        (["--out", "a/"], "several strategies stand on one page"),
        (["--strategy", "edit"], "the same --strategy is given twice"),
        (["--set", "nonsense=1"], "none of edit, multi_bd takes nonsense"),
    ],
)
def test_several_strategies_are_refused_in_one_line(
    random_folder, fails, argv, reported, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    words = ["trace", "Hi", "--model", str(random_folder), "--strategy", "edit"]
    assert reported in fails(2, *words, "--strategy", "multi_bd", *argv)


# --- the page in a browser ------------------------------------------------------------------------

# What a reader sees of the page.
LOOK = """(() => {
  const all = (query) => Array.from(document.querySelectorAll(query));
  const texts = (query) => all(query).map((one) => one.textContent);
  return {
    hash: location.hash,
    counts: texts(".counts"),
    events: texts(".events"),
    settled: texts(".settled"),
    ahead: texts(".ahead[id]"),
    gaps: all(".text .gap").length,
    ends: texts(".end-token:not([hidden])"),
    endCells: texts(".board .cell.end .piece"),
    dropped: all(".board .cell.dropped").length,
    pieces: texts(".board .piece"),
    tabbable: all(".board").map((board) => board.querySelectorAll('[tabindex="0"]').length),
    focused: document.activeElement.getAttribute("aria-label"),
    details: texts("#details")[0],
    title: document.title,
    wide: document.documentElement.scrollWidth > innerWidth,
  };
})()"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    if browser.find() is None:
        pytest.skip("no Chromium is installed")
    one = browser.Browser(tmp_path_factory.mktemp("browser"))
    yield one
    one.close()


@pytest.fixture
def browse(chromium, tmp_path):
    """Opens a page; what is returned presses keys there, and tells what is seen then."""

    def opened(page, step="", width=1200, height=900):
        (tmp_path / "page.html").write_text(page, encoding="utf-8")
        chromium.look(width, height)
        chromium.open((tmp_path / "page.html").as_uri() + step)

        def press(*keys):
            chromium.press(*keys)
            return chromium.run(LOOK)

        return press

    return opened


TEXT = " one two three four five."


@pytest.mark.long
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_the_window_is_seen_when_the_page_opens(browse, chromium, width, height):
    """A row of its cells at least, on a laptop and on a phone, without scrolling."""
    press = browse(page_of(FAST), width=width, height=height)
    place = "document.querySelector('.block.window .cell').getBoundingClientRect().bottom"
    assert chromium.run(f"{place} < document.getElementById('controls').offsetTop")
    assert not press()["wide"]


@pytest.mark.long
def test_future_is_hidden_until_played(browse):
    press = browse(page_of(FAST))
    begin, first, last = press(), press("ArrowRight"), press("End")
    assert begin["settled"] == begin["ahead"] == [""]
    assert "".join(begin["pieces"]) == ""
    assert begin["counts"] == [
        "Step 0 of 2 · 0 forwards · 0 tokens settled · 0.00 tokens per forward"
    ]
    # The second step writes over " six", and fills the holes before and after it.
    assert (first["settled"], first["ahead"], first["gaps"]) == ([" one two"], [" six"], 1)
    assert (last["settled"], last["ahead"], last["gaps"]) == ([TEXT], [""], 0)
    assert last["title"] == "fast: how a text was denoised"


@pytest.mark.long
def test_end_token_stands_behind_the_text(browse):
    press = browse(page_of(FAST))
    first, last = press("n"), press("n")
    assert first["ends"] == first["endCells"] == []
    assert last["ends"] == last["endCells"] == ["<|end|>"]
    assert last["dropped"] == 1
    assert "finished, the end token <|end|> follows the text" in last["events"][0]


@pytest.mark.long
def test_address_holds_the_step(browse, chromium):
    press = browse(page_of(SLOW), "#step=3")
    assert press()["counts"][0].startswith("Step 3 of 5")
    assert press("ArrowRight")["hash"] == "#step=4"
    for asked, shown in ((1, 1), (99, 5)):
        chromium.run(f"location.hash = '#step={asked}'")
        chromium.wait(f"document.querySelector('.counts').textContent.startsWith('Step {shown}')")


@pytest.mark.long
def test_cells_are_reached_by_keyboard(browse, chromium):
    press = browse(page_of(FAST))
    begin = press()
    chromium.run("document.querySelector('.board [tabindex=\"0\"]').focus()")
    right, down, stepped = press("ArrowRight"), press("ArrowDown"), press("n")
    end, none = press("End"), press("Escape")
    assert begin["tabbable"] == [1]
    assert "Tab" in begin["details"]
    assert "position 5" in right["details"]
    assert "position 9" in down["details"]  # the same column of the next block
    assert stepped["counts"][0].startswith("Step 1 of 2")
    assert (stepped["focused"], stepped["tabbable"]) == ("hole", [1])
    assert stepped["details"].startswith("hole; the model proposes zero (id 0), probability 25.0 %")
    assert end["focused"] == "<|end|>"
    assert "position 11" in end["details"]
    assert none["details"] == begin["details"]


@pytest.mark.long
def test_two_strategies_share_the_slider(browse, chromium):
    press = browse(page_of(FAST, SLOW))
    both = press("n", "n")
    chromium.run("slider.value = slider.max, slider.dispatchEvent(new Event('input'))")
    over = press()
    figures = "Step 2 of {} · 2 forwards · {} tokens settled"
    assert both["counts"][0].startswith(figures.format(2, 6))
    assert both["counts"][1].startswith(figures.format(5, 2))
    assert both["tabbable"] == [1, 1]
    assert over["hash"] == "#step=5"
    assert over["counts"][0].startswith("Step 2 of 2 · 2 forwards")
    assert over["counts"][1].startswith("Step 5 of 5 · 5 forwards")
    assert over["events"][0].startswith("Finished after step 2")
    assert over["settled"] == [TEXT, TEXT]


@pytest.mark.long
@pytest.mark.parametrize("trajectories", [[FAST], [FAST, SLOW]], ids=["one", "two"])
def test_page_fits_360_pixels(browse, trajectories):
    assert not browse(page_of(*trajectories), width=360)("n")["wide"]
