"""Proves that what `dllm-jax trace` shows is the trajectory, whatever the tokens are.

Pictures are read back pixel by pixel. What the page does in a browser is in test_page.py.
"""

import dataclasses
import html.parser
import json
import re
from importlib import resources
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import strategies
from dllm_jax.cli import main
from dllm_jax.loading.pieces import Piece, piece, visible
from dllm_jax.trace import picture
from dllm_jax.trace.page import page_facts, render_page
from dllm_jax.trace.replay import HOLE, replay
from dllm_jax.trace.trajectory import Step, Trajectory, Window

NASTY = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "<!--",
    "{{SCRIPT}}",
    " שלום",
    "\u202eevil",
    "👩‍👩‍👧",
    "\u2028\u0000\n",
    "&amp;",
)

pytestmark = pytest.mark.usefixtures("no_compile_cache")


class Tokenizer:
    """Id i is the i-th text; after them is one byte of a character, by its byte-level name."""

    def __init__(self, texts, special=()):
        self.added_tokens_decoder = dict.fromkeys(special, SimpleNamespace(special=True))
        self._texts = (*texts, "\ufffd")

    def convert_ids_to_tokens(self, token):
        return "âĤ" if token == len(self._texts) - 1 else self._texts[token]

    def decode(self, ids, skip_special_tokens=False):
        hidden = self.added_tokens_decoder if skip_special_tokens else ()
        return "".join(self._texts[token] for token in ids if token not in hidden)


def window(start, status, tokens):
    return Window(start, np.asarray(status), np.asarray(tokens))


def step(before, after, said=None, commit=0, settled=0):
    """A step whose events follow from its windows; `said` is (token, probability) a cell."""
    said = np.full((*before.tokens.shape, 2), -1.0) if said is None else np.asarray(said, float)
    sure = np.where(said[..., 0] < 0, np.nan, said[..., 1]).astype(np.float32)
    was, now = before.tokens, after.tokens
    return Step(
        before,
        after,
        predicted=said[..., 0].astype(np.int32),
        confidence=sure,
        entropy=sure,
        accepted=(was < 0) & (now >= 0),
        edited=(was >= 0) & (now >= 0) & (was != now),
        commit_len=commit,
        settled_len=settled,
        nfe=1,
        log_prob=sure - 1,
    )


def trajectory(steps, prompt, tokens, limit=99):
    return Trajectory(prompt, tokens, limit, "length", "a model", "Mine", {"block_size": 3}, steps)


# Blocks of 3 cells, a window of 2, one prompt token in it (position 3, token 9).
FIRST = window(3, [0, 0], [[9, -1, -1], [-1, -1, -1]])
SECOND = window(3, [2, 1], [[9, 4, 5], [6, -1, -1]])
THIRD = window(3, [2, 2], [[9, 4, 5], [7, -1, 8]])
FOURTH = window(6, [1, 0], [[7, -1, 8], [-1, -1, -1]])
LAST = window(6, [2, 0], [[7, 3, -1], [-1, -1, -1]])
WORKED = trajectory(
    [
        step(
            FIRST,
            SECOND,
            [[(-1, 0), (4, 0.9), (5, 0.5)], [(6, 0.25), (1, 0.125), (-1, 0)]],
            settled=4,
        ),
        step(
            SECOND,
            THIRD,
            [[(-1, 0), (-1, 0), (2, 0.75)], [(7, 1.0), (1, 0.5), (-1, 0)]],
            commit=3,
            settled=4,
        ),
        step(FOURTH, LAST, [[(7, 0.5), (3, 1.0), (0, 0.1)], [(-1, 0)] * 3], settled=2),
    ],
    prompt=[9, 9, 9, 9],
    tokens=[4, 5, 7, 3],
)


def test_frames_of_a_worked_example():
    played = replay(WORKED)
    assert (played.first, played.end, played.block_size) == (3, 9, 3)
    begin, one, two, three = played.frames
    assert (begin.start, begin.status, begin.put) == (3, [0, 0], [(3, 9, -1)])
    assert (one.start, one.status, one.nfe, one.num_settled) == (3, [2, 1], 1, 3)
    assert one.put == [(4, 4, 900), (5, 5, 500), (6, 6, 250)]
    assert one.guesses == [(7, 1, 125)]
    assert (one.accepted, one.edited) == ([4, 5, 6], [])
    # Token 5 stays whatever the model says; 8 comes without a probability; the window slides.
    assert (two.start, two.status, two.commit_len) == (6, [2, 0], 3)
    assert two.put == [(6, 7, 1000), (8, 8, -1)]
    assert (two.accepted, two.edited, two.guesses) == ([8], [(6, 6)], [(7, 1, 500)])
    # A newer probability of the same token; a cell that is a hole again.
    assert three.put == [(6, 7, 500), (7, 3, 1000), (8, HOLE, -1)]
    assert three.guesses == [(8, 0, 100)]
    assert (three.nfe, three.num_settled) == (3, 4)


def test_window_off_the_grid_is_shown_without_blocks():
    one = step(window(4, [1], [[5, -1]]), window(4, [1], [[5, 6]]), commit=1, settled=2)
    two = step(window(5, [1], [[6, -1]]), window(5, [1], [[6, 7]]), commit=1, settled=2)
    played = replay(trajectory([one, two], [1, 2, 3, 4], [5, 6, 7]))
    assert (played.first, played.end, played.block_size) == (4, 8, 0)


def test_trajectory_without_steps_is_refused():
    with pytest.raises(ValueError, match="nothing was decoded"):
        replay(trajectory([], [1], []))


def random_trajectory(seed, size=4, blocks=3, num_steps=12):
    """Windows that fill, change, empty and slide at random; and all of them."""
    rng = np.random.default_rng(seed)
    tokens = np.where(rng.random((blocks, size)) < 0.2, 1, -1)
    start, steps = 8, []
    for _ in range(num_steps):
        before = window(start, [1] * blocks, tokens)
        new = rng.integers(-1, 9, tokens.shape)
        after = window(start, [1] * blocks, np.where(rng.random(tokens.shape) < 0.4, new, tokens))
        said = np.stack([rng.integers(-1, 9, tokens.shape), rng.random(tokens.shape)], axis=-1)
        commit = size * int(rng.integers(0, 2))
        steps.append(step(before, after, said, commit))
        flat = np.concatenate([after.tokens.ravel()[commit:], np.full(commit, -1)])
        tokens, start = flat.reshape(blocks, size), start + commit
    return trajectory(steps, [0] * 8, [1] * 5)


@pytest.mark.parametrize("seed", range(20))
def test_changes_alone_rebuild_every_window(seed):
    made = random_trajectory(seed)
    played = replay(made)
    held = {}
    for number, frame in enumerate(played.frames):
        before = dict(held)
        for position, token, share in frame.put:
            held[position] = (token, share)
            if token == HOLE:
                del held[position]
        if not number:
            continue
        done = made.steps[number - 1]
        assert frame.start == done.before.start + done.commit_len
        for cell, token in enumerate(done.after.tokens.ravel()):
            position = done.before.start + cell
            assert held.get(position, (HOLE, 0))[0] == token
            assert (position in frame.accepted) == done.accepted.ravel()[cell]
            assert (position in dict(frame.edited)) == done.edited.ravel()[cell]
            if done.edited.ravel()[cell]:
                assert dict(frame.edited)[position] == before[position][0]
            if token >= 0 and token == done.predicted.ravel()[cell]:
                assert held[position][1] == round(1000 * float(done.confidence.ravel()[cell]))


# --- tokens as text -------------------------------------------------------------------------------


def test_pieces_can_be_seen():
    tokens = Tokenizer(["a", " b", "\n\t", "\u202e", "👩‍👩‍👧", "", "\u200b"])
    shown = [piece(tokens, token).text for token in range(8)]
    assert shown == ["a", "␣b", "⏎⇥", "⟨U+202E⟩", "👩‍👩‍👧", "[5]", "⟨U+200B⟩", "⟨E2 82⟩"]
    assert piece(None, 7) == Piece("[7]", False)
    assert piece(tokens, 100) == Piece("[100]", False)
    assert visible("a\u00a0b") == "a⟨U+00A0⟩b"


def test_pieces_of_a_real_tokenizer(random_folder):
    model = dj.load(random_folder)
    tokenizer = model.tokenizer
    assert piece(tokenizer, model.config.mask_token_id).is_special
    ids = tokenizer("How many\npages? é")["input_ids"]
    text = "".join(piece(tokenizer, token).text for token in ids)
    assert text.startswith("How␣")
    assert "⏎" in text
    assert not any(piece(tokenizer, token).is_special for token in ids)


# --- the page -------------------------------------------------------------------------------------


class Parsed(html.parser.HTMLParser):
    """Tags with their attributes, and the texts of scripts."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.scripts, self._is_script = [], [], False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._is_script = tag == "script"

    def handle_endtag(self, tag):
        self._is_script = False

    def handle_data(self, data):
        if self._is_script:
            self.scripts.append(data)


@pytest.fixture(scope="module")
def nasty():
    """A trajectory whose every name and token would break a careless page."""
    ids = list(range(10))
    cells = window(1, [1], [ids])
    said = [[(token, token / 10) for token in ids]]
    empty = window(1, [0], [[-1] * 10])
    made = trajectory([step(empty, cells, said, settled=10)], [0], ids)
    return Trajectory(
        **{**vars(made), "model": NASTY[0], "strategy": NASTY[1], "settings": {NASTY[0]: NASTY[3]}}
    )


def test_page_is_one_file_whatever_the_tokens_are(nasty):
    page = render_page(nasty, Tokenizer(NASTY))
    parsed = Parsed(page)
    assert [tag for tag, _ in parsed.tags].count("script") == 2
    assert not {"img", "link", "iframe", "object", "base"} & {tag for tag, _ in parsed.tags}
    for _, attributes in parsed.tags:
        assert not {"src", "href", "onerror", "onclick"} & attributes.keys()
    assert not re.search(r"https?:|//[a-z]|@import|url\(", page.split('id="data"')[0])
    assert not re.search(r"https?:|import\(|fetch|XMLHttp|innerHTML|eval\(", parsed.scripts[-1])
    data, script = "".join(parsed.scripts[:-1]), parsed.scripts[-1]
    reported = json.loads(json.dumps(page_facts(nasty, Tokenizer(NASTY))))
    assert json.loads(data) == reported
    assert script.rstrip().endswith("start();")
    assert reported["pieces"]["0"] == [NASTY[0], 0]
    assert reported["pieces"]["9"] == ["⟨E2 82⟩", 0]
    assert reported["text"] == "".join(NASTY) + "\ufffd"


def test_script_finds_what_it_asks_the_page_for():
    files = resources.files("dllm_jax.trace")
    page, script, style = (
        (files / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "js", "css")
    )
    asked = set(re.findall(r'byId\("(\w+)"\)', script))
    assert asked >= {"slider", "play", "panels", "legend"}
    assert asked <= set(re.findall(r'id="(\w+)"', page))
    parts = set(re.findall(r'part\("([\w-]+)"\)', script))
    assert parts >= {"board", "settled", "ahead"}
    assert parts <= set(" ".join(re.findall(r'class="([^"]+)"', page)).split())
    used = set(re.findall(r"(?<![.\w])data\.(\w+)", script)) | set(
        re.findall(r"frame\.(\w+)", script)
    )
    facts = page_facts(WORKED)
    assert used <= facts.keys() | facts["frames"][0].keys()
    made = set(re.findall(r'classes\.push\("(\w+)"\)', script))
    assert made <= {*re.findall(r"\.cell\.(\w+)", style), "unasked"}


def test_page_counts_settled_text():
    facts = page_facts(WORKED, Tokenizer("abcdefghij"))
    assert facts["text"] == "efhd"
    assert [frame["settled"] for frame in facts["frames"]] == [0, 3, 3, 4]
    assert [frame["shown"] for frame in facts["frames"]] == [0, 3, 3, 4]
    assert facts["promptLen"] == 4
    assert facts["windowSize"] == 6


# --- pictures -------------------------------------------------------------------------------------


def pixel(image, column, row, dx, dy, block=0):
    """The colour inside a cell of the worked example, dx and dy units from its corner."""
    x = picture.MARGIN + picture.PAD + column * (picture.CELL_WIDTH + picture.GAP) + dx
    y = picture.MARGIN + 3 * picture.HEAD + row * (picture.CELL_HEIGHT + picture.GAP) + dy
    y += block * (picture.HEAD + picture.CELL_HEIGHT + picture.GAP + picture.PAD)
    red, green, blue = image.getpixel((x * picture.SCALE, y * picture.SCALE))
    return f"#{red:02x}{green:02x}{blue:02x}"


def test_pictures_show_probabilities_edits_and_the_window():
    begin, one, two, _ = picture.render_pictures(WORKED)
    assert begin.size != one.size  # a block that is not open has no cells
    middle = (picture.CELL_WIDTH - 8, 10)  # next to the text
    assert pixel(one, 1, 0, *middle) == picture.colour(900) == "#cfe6d2"
    assert pixel(one, 2, 0, *middle) == picture.colour(500) == "#f7dca6"
    assert pixel(one, 0, 0, *middle) == picture.PANEL  # of the prompt
    edges = [pixel(one, column, 0, 30, 0) for column in range(3)]
    assert edges == [picture.LINE, picture.NEW, picture.NEW]
    assert pixel(two, 0, 0, 30, 0, block=1) == picture.EDIT
    assert pixel(two, 2, 0, *middle, block=1) == picture.UNASKED
    # The window has moved on from the first block.
    assert pixel(one, 5, 0, 0, 0) == picture.PANEL
    assert pixel(two, 5, 0, 0, 0) == picture.PAGE
    assert pixel(two, 5, 0, 0, 0, block=1) == picture.PANEL


def test_pictures_take_any_token(nasty):
    first, last = picture.render_pictures(nasty, Tokenizer(NASTY))
    assert first.width == last.width
    assert picture._printable("日a") == "U+65E5a"


# --- the command ----------------------------------------------------------------------------------


def made_by(made):
    """The strategy value that a trajectory's settings describe."""
    return strategies.MultiBD(**made.settings)


@pytest.fixture
def trace(random_folder, capsys):
    def run(*argv):
        status = main(["trace", "How many pages?", "--model", str(random_folder), *map(str, argv)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.mark.long
def test_command_writes_each_form(trace, random_folder, tmp_path, monkeypatch):
    how = ("--max-tokens", "40", "--accept-threshold", "0.02", "--temperature", "0.9")
    status, out, _ = trace(*how, "--seed", "7", "--json")
    assert status == 0
    made = Trajectory.from_json(out)
    model = dj.load(str(random_folder))
    asked = "<|user|>How many pages?<|assistant|>"
    assert made.prompt == model.tokenizer(asked, add_special_tokens=False)["input_ids"]
    assert (made.limit - len(made.prompt), made.settings["accept_threshold"]) == (40, 0.02)
    key = jax.random.key(7)
    again = dj.record(model, made.prompt, made_by(made), max_tokens=40, temperature=0.9, key=key)
    assert made.tokens == again.tokens
    # From here on nothing is decoded again, and the text is shorter.
    made = dataclasses.replace(made, steps=made.steps[:4])
    monkeypatch.setattr("dllm_jax.trace.recording.record", lambda *_, **__: made)
    monkeypatch.setattr("dllm_jax.cli.sources.load_model", lambda _: model)
    steps = len(made.steps)
    figures = f"{len(made.tokens)} tokens, {made.nfe} forwards, "
    for name in ("a.html", "a.json", "a.png"):
        status, out, _ = trace("--out", tmp_path / name)
        assert (status, out.count("\n")) == (0, 1)
        assert out.startswith(str(tmp_path / name))
        assert figures in out
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == made.to_json() + "\n"
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == render_page(made, model.tokenizer)
    status, out, _ = trace("--out", f"{tmp_path / 'all'}/")
    pictures = sorted(path.name for path in (tmp_path / "all").iterdir())
    assert pictures == [f"step-{i:04}.png" for i in range(steps + 1)]
    assert f"{steps + 1} pictures: " in out
    assert trace("--out", f"{tmp_path / 'called.png'}/")[0] == 0  # a folder, whatever its name
    assert len(list((tmp_path / "called.png").iterdir())) == steps + 1
    assert trace("--step", "1", "--out", tmp_path / "one.png")[0] == 0
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "all" / pictures[1]).read_bytes()
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "all" / pictures[-1]).read_bytes()
    status, _, err = trace("--step", "999", "--out", tmp_path / "one.png")
    reported = f"error: --step 999: the text took {steps} steps; give one in [0, {steps}]\n"
    assert (status, err) == (2, reported)


@pytest.mark.parametrize(
    ("argv", "reported"),
    [
        (["--out", "no/such/a.html"], "there is no folder 'no/such'"),
        (["--out", "a.gif"], "'a.gif' is no FILE.html, FILE.json, FILE.png and no folder"),
        (["--out", "a"], "a new folder with / behind it"),
        (["--out", ""], "--out is empty; name a file or a folder"),
        (["--step", "1", "--out", "new.png/"], "--step goes with --out FILE.png"),
        (["--out", "file/"], "'file/' cannot be written: it is a file"),
        (["--json", "--out", "a.json"], "--json prints and --out writes"),
        (["--step", "1"], "--step goes with --out FILE.png"),
        (["--stop", "x"], "use --stop-token-ids"),
        (["--half", "hard"], "--half is about problems drawn by --seed"),
    ],
)
def test_mistakes_are_one_line_before_the_work(
    random_folder, fails, argv, reported, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert reported in fails(2, "trace", "How many?", "--model", str(random_folder), *argv)


def test_interrupted_or_failed_it_leaves_the_old_file(trace, tmp_path, monkeypatch):
    old = tmp_path / "a.html"
    old.write_text("old")

    def stopped(*_, **__):
        raise KeyboardInterrupt

    def failing(self, *_, **__):
        with open(self, "w") as file:
            file.write("half")
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("dllm_jax.trace.recording.record", stopped)
        assert trace("--out", old)[0] == 130
    with monkeypatch.context() as patch:
        patch.setattr("dllm_jax.trace.recording.record", lambda *_, **__: WORKED)
        patch.setattr("pathlib.Path.write_text", failing)
        status, _, err = trace("--out", old)
    assert status == 1
    assert re.fullmatch(r"error: no space left on device( \(.*\))?\n", err)
    assert old.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]
