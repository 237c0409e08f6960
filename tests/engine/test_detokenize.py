"""Proves that streamed text matches the token ids, however the ids arrive.

Oracles: the tokenizer's own decoding of all ids at once, and a search for stop strings that looks
at every end in turn. Three tokenizers: the built-in one, a byte-level BPE whose characters are
split into single bytes, and one in SentencePiece's form.
"""

import itertools
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import dllm_jax
from dllm_jax.engine.detokenize import TextStream
from dllm_jax.engine.engine import Engine
from dllm_jax.engine.requests import Request, SamplingParams
from dllm_jax.loading.tokenizer import read_tokenizer
from tests.engine.test_scheduler import make_layout
from tests.oracles.engine_world import HOST

BUILTIN = Path(dllm_jax.__file__).parent / "builtin" / "tiny-sdar"
KINDS = ("builtin", "bytes", "fallback")
BROKEN = "\ufffd"


def wrapped(tokenizer):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def byte_tokenizer():
    """Every byte, a few words of several and of parts of characters, one special id."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = [spell.pre_tokenize_str(text)[0][0] for text in ("ab", " ab", "é", "€", "a\nb", BROKEN)]
    euro = spell.pre_tokenize_str("€")[0][0]
    words += ["a" + euro[:2], euro[2] + "b", euro[:2], euro[1:], euro[1:] + euro[0]]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys([*alphabet, *words]))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens([AddedToken("<|plain|>", special=False)])
    return wrapped(tokenizer)


def fallback_tokenizer():
    """Llama's form: words with their space, all bytes, one leading space dropped."""
    words = ["<unk>", "▁", "▁a", "a", "b", "ab", "▁ab", "é", "▁▁", ".", "€", BROKEN]
    vocabulary = {token: i for i, token in enumerate(words)}
    vocabulary |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return wrapped(tokenizer)


@pytest.fixture(scope="module")
def tokenizers():
    made = {
        "builtin": read_tokenizer(BUILTIN),
        "bytes": byte_tokenizer(),
        "fallback": fallback_tokenizer(),
    }
    assert tuple(made) == KINDS
    return made


def bytes_of(tokenizer, kind, text):
    """Ids of single bytes."""
    if kind == "fallback":
        names = [f"<0x{byte:02X}>" for byte in text.encode()]
    else:
        spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        names = [letter for word, _ in spell.pre_tokenize_str(text) for letter in word]
    return tokenizer.convert_tokens_to_ids(names)


def whole_text(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True) if ids else ""


def portions(ids, cuts):
    """Growing prefixes of the ids, the last one all of them."""
    return [ids[:cut] for cut in sorted({cut % (len(ids) + 1) for cut in cuts} | {len(ids)})]


def first_stop(text, stops):
    """(begin, end) of the match that ends first, of these the longest; None without one."""
    for end in range(len(text) + 1):
        begins = [end - len(s) for s in stops if text.endswith(s, 0, end)]
        if begins:
            return min(begins), end
    return None


def fewest(tokenizer, ids, text):
    """How many ids it takes to make a text."""
    return next(n for n in range(len(ids) + 1) if whole_text(tokenizer, ids[:n]).startswith(text))


@st.composite
def cases(draw):
    kind = draw(st.sampled_from(KINDS))
    # Within a kind, often from few ids, so that characters are broken off and put together.
    size = {"builtin": 768, "bytes": 270, "fallback": 270}[kind]
    some = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=6))
    ids = draw(st.lists(st.sampled_from(some) | st.integers(0, size - 1), max_size=120))
    text = draw(st.text("aé€😀 b", max_size=4))
    place = draw(st.integers(0, len(ids)))
    return kind, ids, text, place, draw(st.lists(st.integers(0, 400), max_size=12))


@settings(max_examples=100)
@given(case=cases())
def test_pieces_join_to_the_tokenizers_own_text(tokenizers, case):
    kind, ids, text, place, cuts = case
    tokenizer = tokenizers[kind]
    ids = ids[:place] + bytes_of(tokenizer, kind, text) + ids[place:]
    stream, pieces = TextStream(tokenizer), []
    for portion in portions(ids, cuts):
        pieces.append(stream.feed(portion))
        assert stream.text == "".join(pieces)
        if kind != "fallback":  # no more is kept back than the bytes of one character
            assert len(whole_text(tokenizer, portion)) - len(stream.text) <= 3
    pieces.append(stream.feed(ids, last=True))
    assert "".join(pieces) == stream.text == whole_text(tokenizer, ids)
    assert stream.stopped is None
    assert stream.feed(ids, last=True) == ""


@settings(max_examples=100)
@given(case=cases(), data=st.data())
def test_stop_string_cuts_at_the_first_match_to_be_complete(tokenizers, case, data):
    kind, ids, text, place, cuts = case
    tokenizer = tokenizers[kind]
    ids = ids[:place] + bytes_of(tokenizer, kind, text) + ids[place:]
    whole = whole_text(tokenizer, ids)
    stops = data.draw(st.lists(st.text("ab é", min_size=1, max_size=3), max_size=2))
    for _ in range(data.draw(st.integers(0, 3))):  # and strings that do occur
        begin = data.draw(st.integers(0, len(whole)))
        end = begin + data.draw(st.integers(1, 6))
        stops += [whole[begin:end]] if whole[begin:end] else []
    found = first_stop(whole, stops)
    stream, settled = TextStream(tokenizer, stops), TextStream(tokenizer)
    for portion in portions(ids, cuts):
        stream.feed(portion)
        settled.feed(portion)
        if stream.stopped is None:  # all is shown but what may begin a stop string
            text = settled.text
            maybe = [i for i in range(len(text)) if any(s.startswith(text[i:]) for s in stops)]
            assert stream.text == text[: min(maybe, default=None)]
            assert stream.num_shown == fewest(tokenizer, portion, stream.text)
    stream.feed(ids, last=True)
    if found is None:
        assert (stream.text, stream.stopped) == (whole, None)
        return
    assert stream.text == whole[: found[0]]
    assert stream.stopped == fewest(tokenizer, ids, stream.text)
    assert stream.feed([*ids, *ids]) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_character_is_shown_when_its_last_byte_is_there(tokenizers, kind):
    tokenizer = tokenizers[kind]
    letter = bytes_of(tokenizer, "bytes", "a") if kind != "fallback" else [3]
    ids = letter + bytes_of(tokenizer, kind, "😀") + letter
    stream = TextStream(tokenizer)
    shown = [stream.feed(ids[: i + 1]) for i in range(len(ids))]
    # With byte fallback a run of bytes can turn out broken as long as it goes on.
    want = ["a", "", "", "", "", "😀a"] if kind == "fallback" else ["a", "", "", "", "😀", "a"]
    assert shown == want


def test_run_of_bytes_that_breaks_late_is_shown_as_the_tokenizer_shows_it(tokenizers):
    tokenizer = tokenizers["fallback"]
    ids = bytes_of(tokenizer, "fallback", "é€")
    broken = [*ids, ids[0], 3]  # a character begins and does not end
    stream = TextStream(tokenizer)
    pieces = [stream.feed(broken[: i + 1]) for i in range(len(broken))]
    assert pieces[:-1] == [""] * (len(broken) - 1)
    assert pieces[-1] == whole_text(tokenizer, broken) == BROKEN * 6 + "a"


def test_stop_string_within_a_run_of_bytes_keeps_the_fewest_tokens(tokenizers):
    tokenizer = tokenizers["fallback"]
    ids = bytes_of(tokenizer, "fallback", "é€b")
    stream = TextStream(tokenizer, ["€"])
    stream.feed(ids, last=True)
    assert (stream.text, stream.stopped) == ("é", 2)


def fed(tokenizer, portions, stops=()):
    stream, ids = TextStream(tokenizer, stops), []
    for portion in portions:
        ids = ids + portion
        stream.feed(ids)
    stream.feed(ids, last=True)
    return stream


def test_long_stop_string_is_found_behind_a_long_text(tokenizers):
    stop = "".join(f"{i}," for i in range(40))
    text = "vwxyz" * 40
    ids = bytes_of(tokenizers["bytes"], "bytes", text + stop)
    for portions in ([ids[:260], ids[260:]], [[token] for token in ids]):
        stream = fed(tokenizers["bytes"], portions, [stop])
        assert (stream.text, stream.stopped) == (text, 200)
    stream = TextStream(tokenizers["bytes"], [stop])
    stream.feed(ids[:260])
    assert (stream.text, stream.num_shown) == (text, 200)


def test_stop_string_that_begins_in_a_run_of_bytes_is_counted_in_tokens(tokenizers):
    a, b, dot = 3, 4, 9
    run = bytes_of(tokenizers["fallback"], "fallback", "é" * 6)
    stream = fed(tokenizers["fallback"], [[a] * 99 + [*run, b], [dot]], ["éb."])
    assert (stream.text, stream.stopped) == ("a" * 99 + "é" * 5, 99 + 10)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_without_text_change_nothing(tokenizers, kind):
    tokenizer, unknown = tokenizers[kind], 5000  # models have more ids than their tokenizers
    word = tokenizer.convert_tokens_to_ids("▁a" if kind == "fallback" else "a")
    ids = [word] * 40 + [unknown] * 40 + [word] * 40
    stream = fed(tokenizer, [[token] for token in ids])
    assert stream.text == whole_text(tokenizer, ids)
    assert stream.text.count("a") == 80


class PerByte:
    """Ids are bytes; each one that is part of no whole character is shown as broken."""

    def decode(self, ids, skip_special_tokens):
        data, text = bytes(ids), ""
        while data:
            size = next((n for n in (1, 2, 3, 4) if is_text(data[:n])), 0)
            text += data[:size].decode() if size else BROKEN
            data = data[size or 1 :]
        return text


def is_text(data):
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


def test_tokenizer_that_shows_every_broken_byte_is_waited_for():
    text = "a😀€é" * 20
    stream, shown = TextStream(PerByte()), []
    ids = list(text.encode())
    for i in range(len(ids)):
        shown.append(stream.feed(ids[: i + 1]))
    assert "".join(shown) == text
    assert set(shown) == {"", *text}


def test_stop_string_that_an_abort_brings_to_light_ends_the_text(tokenizers):
    tokenizer = tokenizers["fallback"]
    params = SamplingParams(stop="€")
    runner = SimpleNamespace(layout=make_layout(HOST), cost=None)
    engine = Engine(runner, tokenizer)
    name = engine.add(Request(prompt_token_ids=[5], params=params))
    (sequence,) = engine.sequences(name)
    sequence.tokens = [3, *bytes_of(tokenizer, "fallback", "é€")]
    engine._feed(sequence, last=False)
    assert sequence.stream.text == "a"  # the run of bytes could go on
    (one,) = engine.outputs()[0].outputs
    assert (one.text, one.token_ids, one.finish_reason) == ("a", [3], None)
    engine.abort(name)
    (one,) = engine.step()[0].outputs
    assert (one.text, len(one.token_ids), one.finish_reason) == ("aé", 3, "stop")


@pytest.mark.parametrize(
    ("text", "stops", "visible"),
    [
        ("xxabcabd", ("abd",), "xxabc"),  # a beginning that fails gives way to the next
        ("aaab", ("aab",), "a"),
        ("abcd", ("bc", "abcd"), "a"),  # complete first
        ("abcd", ("cd", "abcd", "bcd"), ""),  # complete together: the longest
        ("abcd", ("d", "a"), ""),
        ("abc", ("abcd",), "abc"),  # the end shows what was held back
    ],
)
def test_stop_string_is_the_same_for_every_portion(tokenizers, text, stops, visible):
    tokenizer = tokenizers["bytes"]
    ids = bytes_of(tokenizer, "bytes", text)
    for cuts in itertools.product((0, 1), repeat=len(ids)):
        stream = TextStream(tokenizer, stops)
        for i, cut in enumerate(cuts):
            if cut:
                stream.feed(ids[: i + 1])
        stream.feed(ids, last=True)
        assert stream.text == visible
        assert stream.stopped == (len(visible) if visible != text else None)


def test_special_ids_count_but_are_not_shown(tokenizers):
    tokenizer = tokenizers["builtin"]
    pad, mask = 0, 1
    a, b = bytes_of(tokenizer, "builtin", "ab")
    stream = TextStream(tokenizer, ["b"])
    assert stream.feed([pad, a]) == "a"
    assert stream.feed([pad, a, mask, pad, b]) == ""
    assert stream.stopped == 2  # after a: what shows nothing is not kept
    first = TextStream(tokenizer, ["a"])
    assert (first.feed([pad, a]), first.stopped) == ("", 0)


class Counting:
    """Counts the ids it is asked to decode."""

    def __init__(self, tokenizer):
        self.tokenizer, self.count = tokenizer, 0
        self.added_tokens_decoder = tokenizer.added_tokens_decoder

    def decode(self, ids, skip_special_tokens):
        self.count += len(ids)
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def get_vocab(self):
        return {}


@pytest.mark.parametrize("what", ["words", "broken", "special", "beginnings"])
def test_a_call_costs_what_its_new_ids_cost(tokenizers, what):
    tokenizer = tokenizers["builtin"]
    a, b = bytes_of(tokenizer, "builtin", "ab")
    half = bytes_of(tokenizer, "builtin", "é")[1]
    pattern = {
        "words": [300, 301, a, 302],
        "broken": [half],
        "special": [0],
        "beginnings": [a, b],
    }[what]
    stop = "ab" * 40 + "c"
    spent = []
    for length in (600, 1200, 1800):
        counting = Counting(tokenizer)
        stream = TextStream(counting, [stop])
        ids = (pattern * length)[:length]
        for i in range(length):
            stream.feed(ids[: i + 1])
        stream.feed(ids, last=True)
        assert stream.text == whole_text(tokenizer, ids)
        spent.append(counting.count)
    assert spent[2] - spent[1] <= 1.1 * (spent[1] - spent[0]) + 100
    assert spent[2] <= 1800 * (40 + (2 * len(stop) if what == "beginnings" else 0))


def test_tokenizer_that_fails_fails_in_feed_alone():
    class Failing:
        def decode(self, ids, skip_special_tokens):
            raise RuntimeError("no such piece")

    stream = TextStream(Failing())
    with pytest.raises(RuntimeError, match="no such piece"):
        stream.feed([1])
