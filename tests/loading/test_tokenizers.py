"""Proves that every form of tokenizer folder gives its tokens their ids, and every family its chat.

Folders are written on the spot, in the forms that published ones have. transformers' own reading is
the oracle where it gets by without the folder's code.
"""

import json
import shutil
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

import dllm_jax as dj
from dllm_jax.cli import main
from dllm_jax.convert.tokenizer_files import read_facts
from dllm_jax.engine.detokenize import TextStream
from dllm_jax.loading import chat
from dllm_jax.loading.reach import reach
from dllm_jax.loading.tokenizer import encode, read_tokenizer
from dllm_jax.models.families import parse_config
from dllm_jax.models.family_table import FAMILIES
from tests.oracles.tiny_configs import CONFIGS

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("1", "2")]
VOCAB = {text: i for i, text in enumerate([*ALPHABET, *("".join(pair) for pair in MERGES)])}
FIRST = len(VOCAB)  # id of the first added token
TEXT = "hello world, hé 12 \u4f60\n\n  x"
BAIT = "raise RuntimeError('code of the folder was run')\n"

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
LLADA = (
    *("<|startoftext|>", "<|endoftext|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|mdm_mask|>"),
)
SEED = ("<[begin▁of▁sentence]>", "<[end▁of▁sentence]>", "<[PAD▁TOKEN]>", "<[MASK_TOKEN]>")
LLADA2 = ("<|startoftext|>", "<|endoftext|>", "<|role_end|>", "<role>", "</role>", "<|mask|>")
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def ids_of(special):
    return {text: FIRST + i for i, text in enumerate(special)}


def flags(content, special=True):
    same = {"single_word": False, "lstrip": False, "rstrip": False}
    return {"content": content, **same, "normalized": False, "special": special}


def put(folder, name, content):
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    (folder / name).write_text(text, encoding="utf-8")


def whole(folder, special, bos=None, **config):
    """The form of most folders: one tokenizer.json; with `bos` a text begins with that token."""
    tokenizer = Tokenizer(models.BPE(vocab=VOCAB, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, ids_of(special)[bos])]
        )
        config["bos_token"] = bos
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    put(folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **config})
    return folder


def split(folder, special, decoder=True, plain=(), **config):
    """Dream's and SDAR's form: vocabulary, merges, added tokens, and a class that needs code.

    `plain` are added tokens that are not special; without `decoder` only added_tokens.json has any.
    """
    added = ids_of([*special, *plain])
    folder.mkdir(parents=True, exist_ok=True)
    put(folder, "vocab.json", VOCAB)
    put(folder, "merges.txt", "\n".join(["#version: 0.2", *(" ".join(pair) for pair in MERGES)]))
    put(folder, "added_tokens.json", added)
    if decoder:
        records = {str(i): flags(text, text in special) for text, i in added.items()}
        config["added_tokens_decoder"] = records
    custom = {
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
    }
    put(folder, "tokenizer_config.json", {**custom, **config})
    put(folder, "tokenization_dream.py", BAIT)
    return folder


def check_ids(tokenizer, expected):
    """Each added token has its id, both ways and within a text."""
    for text, i in expected.items():
        assert tokenizer.convert_ids_to_tokens(i) == text
        found = tokenizer(f"hello{text}x", add_special_tokens=False)["input_ids"]
        assert found == [VOCAB["hello"], i, VOCAB["x"]], text


# --- the forms of a folder ------------------------------------------------------------------------


def test_a_whole_tokenizer_is_read_as_transformers_reads_it(tmp_path):
    from transformers import PreTrainedTokenizerFast

    roles = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "mask_token": "<think>"}
    folder = whole(tmp_path, CHATML, bos="<|im_start|>", model_max_length=77, **roles)
    ours, theirs = read_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    assert ours(TEXT)["input_ids"] == theirs(TEXT)["input_ids"]
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.added_tokens_decoder == theirs.added_tokens_decoder
    assert (len(ours), ours.model_max_length) == (len(theirs), 77)
    assert ours.decode(ours(TEXT)["input_ids"], skip_special_tokens=True) == TEXT
    check_ids(ours, ids_of(CHATML))


def test_a_vocabulary_with_merges_is_read_as_the_stock_class_reads_it(tmp_path):
    from transformers import Qwen2Tokenizer

    roles = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None}
    special = CHATML[:3]
    folder = split(tmp_path, special, plain=CHATML[3:], mask_token="<|im_start|>", **roles)
    ours, theirs = read_tokenizer(folder), Qwen2Tokenizer.from_pretrained(folder)
    assert type(ours) is type(theirs)
    assert ours(TEXT)["input_ids"] == theirs(TEXT)["input_ids"]
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.added_tokens_decoder == theirs.added_tokens_decoder
    assert {i for i, token in ours.added_tokens_decoder.items() if not token.special} == {
        ids_of(CHATML)["<think>"],
        ids_of(CHATML)["</think>"],
    }
    assert ours.decode(ours(TEXT)["input_ids"]) == TEXT
    check_ids(ours, ids_of(CHATML))


def test_added_tokens_that_no_config_lists_keep_their_ids_and_roles(tmp_path):
    folder = split(tmp_path, ("<|endoftext|>", "<|mask|>"), decoder=False, plain=("<think>",))
    put(folder, "special_tokens_map.json", {"mask_token": flags("<|mask|>"), "eos_token": "<no>"})
    tokenizer, facts = read_tokenizer(folder), read_facts(folder)
    check_ids(tokenizer, {"<|endoftext|>": FIRST, "<|mask|>": FIRST + 1, "<think>": FIRST + 2})
    assert (facts.num_tokens, facts.mask_token_id) == (FIRST + 3, FIRST + 1)
    assert (facts.eos_token_id, facts.special_token_ids) == (None, (FIRST + 1,))
    special = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    assert (special, tokenizer.mask_token_id, tokenizer.eos_token) == ([FIRST + 1], FIRST + 1, None)


@pytest.mark.parametrize("gap", [0, 7])
def test_a_token_that_only_the_files_beside_know_has_its_id(tmp_path, gap):
    # LLaDA2 and Fast-dLLM v2: the mask is in no config.json and has no role. The tokenizers library
    # itself would give it the next free id.
    folder = whole(tmp_path, CHATML)
    mask = FIRST + len(CHATML) + gap
    put(folder, "added_tokens.json", {**ids_of(CHATML), "|<MASK>|": mask})
    facts = read_facts(folder)
    assert (facts.num_tokens, facts.mask_token_id) == (mask + 1, None)
    assert facts.mask_id("|<MASK>|") == facts.id_of("|<MASK>|") == mask
    assert facts.mask_id("<|mask|>") is None
    tokenizer = read_tokenizer(folder, mask)
    check_ids(tokenizer, {**ids_of(CHATML), "|<MASK>|": mask})
    assert tokenizer.mask_token_id == mask


def test_a_token_of_the_settings_alone_has_its_id(tmp_path):
    decoder = {str(FIRST + 2): flags("<|mask|>")}
    folder = whole(tmp_path, CHATML[:2], added_tokens_decoder=decoder)
    check_ids(read_tokenizer(folder), {**ids_of(CHATML[:2]), "<|mask|>": FIRST + 2})
    assert read_facts(folder).special_token_ids == (FIRST, FIRST + 1, FIRST + 2)


@pytest.mark.parametrize("form", [split, whole])
def test_a_mask_token_that_is_none_gets_no_id(tmp_path, form):
    # SDAR: tokenizer_config.json names <|MASK|>, the vocabulary has <MASK>.
    folder = form(tmp_path, (*CHATML, "<MASK>"), mask_token="<|MASK|>", eos_token="<|im_end|>")
    mask = FIRST + len(CHATML)
    facts = read_facts(folder)
    assert (facts.mask_token, facts.mask_token_id, facts.num_tokens) == ("<|MASK|>", None, mask + 1)
    assert facts.mask_id("<|MASK|>", "<MASK>") == mask
    tokenizer = read_tokenizer(folder, facts.mask_id("<|MASK|>", "<MASK>"))
    assert (tokenizer.mask_token, tokenizer.mask_token_id) == ("<MASK>", mask)
    assert max(tokenizer.get_vocab().values()) == mask
    assert mask not in tokenizer("<|MASK|>")["input_ids"]
    assert read_tokenizer(folder).mask_token is None  # a model that has no mask


def test_two_texts_of_one_id_are_one_token(tmp_path):
    # Where the settings call 151669 <|MASK|> and added_tokens.json calls it <MASK>.
    folder = split(tmp_path, (*CHATML, "<|MASK|>"), mask_token="<|MASK|>")
    mask = FIRST + len(CHATML)
    put(folder, "added_tokens.json", {**ids_of(CHATML), "<MASK>": mask})
    facts = read_facts(folder)
    assert facts.id_of("<MASK>") == facts.id_of("<|MASK|>") == facts.mask_token_id == mask
    assert facts.num_tokens == mask + 1
    tokenizer = read_tokenizer(folder, mask)
    check_ids(tokenizer, {"<|MASK|>": mask})
    assert len(tokenizer) == mask + 1


def test_a_token_with_two_ids_has_the_one_of_the_vocabulary(tmp_path):
    folder = whole(tmp_path, CHATML)
    put(folder, "added_tokens.json", {"<think>": FIRST + 40, "hello": 3})
    facts = read_facts(folder)
    assert facts.id_of("<think>") == ids_of(CHATML)["<think>"]
    assert facts.id_of("hello") == VOCAB["hello"]
    assert facts.num_tokens == FIRST + len(CHATML)
    check_ids(read_tokenizer(folder), ids_of(CHATML))


@pytest.mark.parametrize("form", [split, whole])
@pytest.mark.parametrize("name", ["extra_special_tokens", "additional_special_tokens"])
@pytest.mark.parametrize("as_map", [False, True])
def test_special_tokens_come_as_a_list_or_by_name(tmp_path, form, name, as_map):
    tokens = ["<|im_start|>", "<no token>"]
    folder = form(
        tmp_path, CHATML, **{name: {"a": tokens[0], "b": tokens[1]} if as_map else tokens}
    )
    tokenizer = read_tokenizer(folder)
    assert ids_of(CHATML)["<|im_start|>"] in read_facts(folder).special_token_ids
    assert len(tokenizer) == FIRST + len(CHATML)
    assert (
        tokenizer.decode(tokenizer("a<|im_start|>b")["input_ids"], skip_special_tokens=True) == "ab"
    )


@pytest.mark.parametrize("form", [split, whole])
def test_the_masks_text_is_never_shown(tmp_path, form):
    # Also where no file says that the token is special.
    settings = {"added_tokens_decoder": {str(FIRST): flags("<MASK>", special=False)}}
    folder = (
        whole(tmp_path, (), **settings) if form is whole else split(tmp_path, (), plain=["<MASK>"])
    )
    assert read_facts(folder).special_token_ids == ()
    shown, hidden = read_tokenizer(folder), read_tokenizer(folder, FIRST)
    text = [VOCAB["hello"], FIRST, VOCAB["x"]]
    assert shown.decode(text, skip_special_tokens=True) == "hello<MASK>x"
    assert hidden.decode(text, skip_special_tokens=True) == "hellox"
    assert TextStream(hidden).feed(text, last=True) == "hellox"


def test_a_named_token_of_the_plain_vocabulary_is_special(tmp_path):
    folder = whole(tmp_path, (), eos_token="hello")
    tokenizer = read_tokenizer(folder)
    assert (tokenizer.eos_token_id, len(tokenizer)) == (VOCAB["hello"], FIRST)
    assert tokenizer.decode([VOCAB["hello"], VOCAB["x"]], skip_special_tokens=True) == "x"


def test_a_role_of_the_folders_own_is_one_for_its_template(tmp_path):
    settings = {"gmask_token": "<think>", "cls_token": "<no>", "chat_template": "{{ gmask_token }}"}
    folder = whole(tmp_path, CHATML, add_bos_token=True, **settings)
    tokenizer = read_tokenizer(folder)
    assert tokenizer.apply_chat_template(ASK, tokenize=False) == "<think>"
    assert (tokenizer.cls_token, len(tokenizer)) == (None, FIRST + len(CHATML))


@st.composite
def layouts(draw):
    """Added tokens: text, an id above the vocabulary, files that have it, what each says of it."""
    ids = draw(st.lists(st.integers(FIRST, FIRST + 40), min_size=1, max_size=6, unique=True))
    where = st.sets(st.sampled_from(["whole", "decoder", "list"]), min_size=1)
    flag = st.fixed_dictionaries({"whole": st.booleans(), "decoder": st.booleans()})
    return [(f"<|t{i}|>", i, draw(where), draw(flag)) for i in ids]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layouts(), st.booleans())
def test_tokens_in_any_files_have_their_ids(tmp_path, layout, is_whole):
    folder = tmp_path / "any"
    shutil.rmtree(folder, ignore_errors=True)
    (whole if is_whole else split)(folder, ())
    for file in ("added_tokens.json", "tokenizer_config.json"):
        (folder / file).unlink(missing_ok=True)
    files = {
        name: [one for one in layout if name in one[2]] for name in ("whole", "decoder", "list")
    }
    if is_whole:
        content = json.loads((folder / "tokenizer.json").read_text())
        content["added_tokens"] = [
            {"id": i, **flags(t, s["whole"])} for t, i, _, s in files["whole"]
        ]
        put(folder, "tokenizer.json", content)
    decoder = {str(i): flags(text, flag["decoder"]) for text, i, _, flag in files["decoder"]}
    put(folder, "tokenizer_config.json", {"added_tokens_decoder": decoder})
    put(folder, "added_tokens.json", {text: i for text, i, _, _ in files["list"]})
    reported = [name for name in ("whole", "decoder") if is_whole or name != "whole"]
    known = {text: i for text, i, where, _ in layout if where & {*reported, "list"}}
    special = sorted(i for _, i, at, flag in layout if any(flag[name] for name in at & {*reported}))
    tokenizer, facts = read_tokenizer(folder), read_facts(folder)
    check_ids(tokenizer, known)
    assert facts.num_tokens == max([FIRST - 1, *known.values()]) + 1
    assert max(tokenizer.get_vocab().values()) == facts.num_tokens - 1
    found = [i for i, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special]
    assert list(facts.special_token_ids) == found == special


@pytest.mark.parametrize("adds", [False, True])
def test_a_vocabulary_begins_texts_where_its_settings_say_so(tmp_path, adds):
    # What DreamTokenizer's code does with these settings, the stock class does as well.
    folder = split(tmp_path, (*CHATML, "<|beginoftext|>"), bos_token="<|beginoftext|>")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    put(folder, "tokenizer_config.json", {**config, "add_bos_token": adds})
    bos = [FIRST + len(CHATML)]
    tokenizer = read_tokenizer(folder)
    assert tokenizer("hello")["input_ids"] == [*(bos if adds else []), VOCAB["hello"]]
    assert tokenizer("hello", add_special_tokens=False)["input_ids"] == [VOCAB["hello"]]


@pytest.mark.parametrize(
    ("file", "content", "reported"),
    [
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("merges.txt", None, "vocab.json has no merges.txt beside it"),
        ("added_tokens.json", {"<x>": "seven"}, "the id of token '<x>' is \"seven\", not a whole"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, file, content, reported):
    folder = split(tmp_path, CHATML)
    (folder / file).unlink()
    if content is not None:
        put(folder, file, content)
    with pytest.raises(
        ValueError, match=r"tokenizer cannot be read .* download its files"
    ) as caught:
        read_tokenizer(folder)
    assert reported in str(caught.value)


MASKS = [(family.name, text) for family in FAMILIES for text in family.mask_tokens]


@pytest.mark.parametrize("form", [split, whole])
@pytest.mark.parametrize(("family", "mask"), MASKS)
def test_every_familys_mask_is_found_by_its_text(tmp_path, form, family, mask):
    # No file gives it a role, and config.json has no id.
    folder = form(tmp_path, ("<|a|>", "<|b|>"))
    put(folder, "added_tokens.json", {"<|a|>": FIRST, "<|b|>": FIRST + 1, mask: FIRST + 2})
    config = {**CONFIGS[family], "vocab_size": FIRST + 20}
    config.pop("mask_token_id", None)
    if family == "llada":
        config["embedding_size"] = FIRST + 20
    parsed = parse_config(config, None, read_facts(folder))
    assert parsed.family == family
    assert parsed.config.mask_token_id == FIRST + 2
    assert parsed.defaults.vocab_limit == FIRST + 3
    assert read_tokenizer(folder, FIRST + 2).mask_token == mask


# --- a text begins once ---------------------------------------------------------------------------


def test_no_text_begins_twice(tmp_path):
    bos = "<|startoftext|>"
    tokenizer = read_tokenizer(whole(tmp_path, LLADA, bos=bos))
    one = ids_of(LLADA)[bos]
    assert tokenizer(f"{bos}x")["input_ids"] == [one, one, VOCAB["x"]]  # the trap
    assert encode(tokenizer, f"{bos}x") == encode(tokenizer, "x") == [one, VOCAB["x"]]
    assert encode(tokenizer, f"{bos}x", special=False) == [one, VOCAB["x"]]
    assert encode(tokenizer, "x", special=False) == [VOCAB["x"]]
    assert encode(tokenizer, "") == [one]
    with pytest.raises(ValueError, match=r"'.udce9' at character 3 is half a character; give"):
        encode(tokenizer, "caf\udce9")
    unchanged = read_tokenizer(whole(tmp_path / "b", LLADA, bos_token=bos))
    assert encode(unchanged, f"{bos}{bos}x") == [one, one, VOCAB["x"]]  # as it is written


# --- chat: each family's template -----------------------------------------------------------------

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hi\n"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye?"},
]
SEED_SYSTEM = (
    "<[begin▁of▁sentence]>system\nYou are an AI programming assistant, utilizing the Seed-Coder "
    "model, developed by ByteDance Seed, and you only answer questions related to computer "
    "science. For politically sensitive questions, security and privacy issues, and other "
    "non-computer science questions, you will refuse to answer.\n\n<[end▁of▁sentence]>"
)
CHATML_TALK = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi\n<|im_end|>\n"
    "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nBye?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
DREAM_ASK = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
QWEN3_ASK = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
# family -> its tokens, what it reads of one question, and of the talk above
GOLDEN = {
    "llada": (
        LLADA,
        "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|startoftext|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHello.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nBye?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "dream": (CHATML, DREAM_ASK, CHATML_TALK),
    "fast_dllm_v2": (
        CHATML,
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
        "<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
        CHATML_TALK,
    ),
    "stable_diffcoder": (
        SEED,
        f"{SEED_SYSTEM}<[begin▁of▁sentence]>user\nWhy?<[end▁of▁sentence]>"
        "<[begin▁of▁sentence]>assistant\n",
        "<[begin▁of▁sentence]>system\nBe brief.\n\n<[end▁of▁sentence]>"
        "<[begin▁of▁sentence]>user\n Hi\n<[end▁of▁sentence]>"
        "<[begin▁of▁sentence]>assistant\nHello.<[end▁of▁sentence]>"
        "<[begin▁of▁sentence]>user\nBye?<[end▁of▁sentence]><[begin▁of▁sentence]>assistant\n",
    ),
    "llada2": (
        LLADA2,
        "<role>SYSTEM</role>detailed thinking off<|role_end|><role>HUMAN</role>Why?<|role_end|>"
        "<role>ASSISTANT</role>",
        "<role>SYSTEM</role>Be brief.\ndetailed thinking off<|role_end|>"
        "<role>HUMAN</role> Hi\n<|role_end|><role>ASSISTANT</role>Hello.<|role_end|>"
        "<role>HUMAN</role>Bye?<|role_end|><role>ASSISTANT</role>",
    ),
    **dict.fromkeys(
        ("dream_reasoner", "sdar", "sdar_moe", "qwen3", "qwen3_moe"),
        (CHATML, QWEN3_ASK, CHATML_TALK),
    ),
}
ASK = [{"role": "user", "content": "Why?"}]


@pytest.fixture
def model(tmp_path):
    """A stand-in of what rendering reads of a model."""

    def make(family, special=None, source=None, **settings):
        folder = whole(
            tmp_path / "talker", GOLDEN[family][0] if special is None else special, **settings
        )
        return SimpleNamespace(
            tokenizer=read_tokenizer(folder),
            defaults=SimpleNamespace(family=family),
            source=source or f"org/{family}-8B-Chat",
        )

    return make


def test_every_family_but_those_named_has_a_template():
    """These bring their own in each folder."""
    own = {"llama", "diffusion_gemma", "illada", "llada_moe", "open_dcoder"}
    own |= {"a2d_qwen3", "a2d_qwen2", "a2d_llama"}
    assert {family.name for family in FAMILIES} <= {*GOLDEN, *own}


@pytest.mark.parametrize("family", GOLDEN)
def test_a_family_reads_a_conversation_as_it_was_trained_to(model, family):
    _, ask, talk = GOLDEN[family]
    one = model(family)
    assert chat.render(one, ASK) == ask
    assert chat.render(one, TALK) == talk
    name = {"llada2": "llada2", "llada": "llada", "stable_diffcoder": "seed_coder"}.get(family)
    name = name or {"dream": "dream", "fast_dllm_v2": "qwen2_5"}.get(family)
    assert chat.note(one) == (
        f"org/{family}-8B-Chat has no chat template in its files; using dllm_jax's "
        f"{name or 'qwen3'}.jinja, the {family} family's"
    )


@pytest.mark.parametrize("family", GOLDEN)
def test_the_answers_header_can_be_left_out(model, family):
    text = chat.render(model(family), ASK, add_generation_prompt=False)
    ask = GOLDEN[family][1]
    assert ask.startswith(text)
    assert (text == ask) == (family == "llada")  # which always has it


@pytest.mark.parametrize("family", ["llada", "stable_diffcoder"])
def test_a_rendered_conversation_begins_once(model, family):
    special = GOLDEN[family][0]
    bos = special[0]
    one = model(family, bos=bos)
    text = chat.render(one, ASK)
    begins = 1 if family == "llada" else 3
    for special_tokens in (False, True):  # also where a user hands the text to `stream`
        ids = encode(one.tokenizer, text, special_tokens)
        assert ids.count(FIRST) == begins
        assert ids[:2] != [FIRST, FIRST]
    assert one.tokenizer(text)["input_ids"].count(FIRST) == begins + 1  # the trap


# --- chat: thinking -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["sdar", "sdar_moe", "dream_reasoner", "qwen3"])
def test_thinking_is_switched_where_the_template_reads_it(model, family):
    one = model(family)
    assert chat.render(one, ASK, enable_thinking=True) == QWEN3_ASK
    assert chat.render(one, ASK, enable_thinking=False) == QWEN3_ASK + "<think>\n\n</think>\n\n"


def test_llada2_says_whether_it_thinks(model):
    one = model("llada2")
    assert chat.render(one, ASK, enable_thinking=False) == GOLDEN["llada2"][1]
    assert chat.render(one, ASK, enable_thinking=True) == (
        "<role>SYSTEM</role>detailed thinking on<|role_end|><role>HUMAN</role>Why?<|role_end|>"
        "<role>ASSISTANT</role>"
    )


# What DiffusionGemma's own template does, in a few lines: the family has none shipped here.
GEMMA = """{{ bos_token }}
{%- set begins = messages[0]['role'] == 'system' -%}
{%- if enable_thinking or begins -%}
{{ '<|turn>system\n' }}{{ '<|think|>\n' if enable_thinking else '' }}
{{- messages[0]['content'] | trim if begins else '' }}{{ '<turn|>\n' }}
{%- endif -%}
{%- for m in messages if m['role'] != 'system' -%}
{%- set said = m['content'] if preserve_thinking else m['content'].split('<channel|>') | last -%}
{{ '<|turn>' }}{{ 'model' if m['role'] == 'assistant' else 'user' }}{{ '\n' + said + '<turn|>\n' }}
{%- endfor -%}
{{ '<|turn>model\n' if add_generation_prompt else '' }}"""
GEMMA_SPECIAL = ("<bos>", "<|turn>", "<turn|>", "<|think|>", "<|channel>", "<channel|>")
HI = {"role": "user", "content": "Hi"}
GEMMA_TALKS = {
    "user": ([HI], "", "<|turn>user\nHi<turn|>\n"),
    "system": (
        [{"role": "system", "content": "Be brief."}, HI],
        "Be brief.",
        "<|turn>user\nHi<turn|>\n",
    ),
    "two turns": (
        [
            HI,
            {"role": "assistant", "content": "<|channel>thought\nHm.<channel|>Hello."},
            {"role": "user", "content": "More"},
        ],
        "",
        "<|turn>user\nHi<turn|>\n<|turn>model\nHello.<turn|>\n<|turn>user\nMore<turn|>\n",
    ),
}


@pytest.mark.parametrize("reported", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
@pytest.mark.parametrize("talk", GEMMA_TALKS)
def test_a_canvas_model_thinks_where_its_folders_template_is_told_to(model, talk, reported):
    """Trap T24: thinking off adds nothing, on is a line at the head of a system turn."""
    one = model("diffusion_gemma", GEMMA_SPECIAL, chat_template=GEMMA, bos_token="<bos>")
    conversation, system, turns = GEMMA_TALKS[talk]
    head = "<|think|>\n" * bool(reported.get("enable_thinking")) + system
    head = f"<|turn>system\n{head}<turn|>\n" if head else ""
    text = chat.render(one, conversation, **reported)
    assert text == f"<bos>{head}{turns}<|turn>model\n"
    assert encode(one.tokenizer, text, False).count(ids_of(GEMMA_SPECIAL)["<bos>"]) == 1
    assert chat.note(one) is None
    kept = chat.render(one, conversation, preserve_thinking=True, **reported)
    assert ("Hm." in kept) == (talk == "two turns")


def test_earlier_thoughts_are_left_out(model):
    talk = [*ASK, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nSo."}, *ASK]
    assert chat.render(model("sdar"), talk) == (
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nSo.<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_answer_that_is_begun_goes_on(model):
    talk = [*ASK, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nSo"}]
    text = chat.render(model("sdar"), talk, continue_final_message=True)
    assert text == (
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n<think>\nHm.\n</think>\n\nSo"
    )
    text = chat.render(model("llada2"), talk, continue_final_message=True)
    assert text.endswith("<role>ASSISTANT</role><think>\nHm.\n</think>\n\nSo")


@pytest.mark.parametrize(
    ("family", "reported", "error"),
    [
        (
            "llada",
            {"enable_thinking": False},
            "does not read enable_thinking, so enable_thinking=F",
        ),
        ("llada", {"tools": [{"name": "f"}]}, "does not read tools, so tools="),
        ("sdar", {"messages": ASK}, "messages=.* is not for a chat template to read; leave it out"),
        ("sdar", {"enable_thinkin": True}, "does not read enable_thinkin, so"),
        ("sdar", {"chat_template_kwargs": {}}, "is not taken as one; give its entries as keywords"),
    ],
)
def test_what_a_template_does_not_read_is_refused(model, family, reported, error):
    with pytest.raises(ValueError, match=error):
        chat.render(model(family), ASK, **reported)


# --- chat: the folder's own template --------------------------------------------------------------

OWN = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}"


def test_the_folders_template_wins(model, tmp_path):
    one = model("llada", chat_template=OWN)
    assert chat.render(one, TALK[:2]) == "[system|Be brief.][user| Hi\n]"
    assert chat.note(one) is None
    with pytest.raises(
        ValueError, match=r"model 'org/llada-8B-Chat' does not read enable_thinking"
    ):
        chat.render(one, ASK, enable_thinking=True)


@pytest.mark.parametrize("form", [split, whole])
def test_a_template_comes_in_three_files(tmp_path, form):
    folder = form(tmp_path, CHATML)
    assert read_tokenizer(folder).chat_template is None
    put(folder, "chat_template.json", {"chat_template": "json"})
    assert read_tokenizer(folder).chat_template == "json"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    put(folder, "tokenizer_config.json", {**config, "chat_template": "config"})
    assert read_tokenizer(folder).chat_template == "config"
    put(folder, "chat_template.jinja", "jinja")
    assert read_tokenizer(folder).chat_template == "jinja"


def named(**templates):
    return [{"name": name, "template": text} for name, text in templates.items()]


def test_one_of_several_templates_is_chosen_by_name_or_by_tools(model):
    said = "{{ messages[0].content }}"
    each = {"default": "plain ", "tool_use": "{{ tools }}", "rag": "found "}
    one = model("sdar", chat_template=named(**{name: text + said for name, text in each.items()}))
    assert chat.render(one, ASK) == "plain Why?"
    assert chat.render(one, ASK, chat_template="rag") == "found Why?"
    assert chat.render(one, ASK, tools=[{"name": "f"}]) == "[{'name': 'f'}]Why?"
    with pytest.raises(
        ValueError, match=r"'nope' is neither Jinja nor one of .* default, rag, tool_use"
    ):
        chat.render(one, ASK, chat_template="nope")
    several = model("sdar", chat_template=named(a="a", b="b"))
    with pytest.raises(
        ValueError, match=r"org/sdar-8B-Chat': .* multiple chat templates .*'a', 'b'"
    ):
        chat.render(several, ASK)


def test_a_given_template_takes_the_place_of_any(model):
    for one in (model("llada"), model("llada", chat_template="{{ 1 }}"), model("llama", LLAMA)):
        assert chat.render(one, ASK, chat_template=OWN) == "[user|Why?]"
    with pytest.raises(ValueError, match=r"template='file.jinja' is neither Jinja nor a name"):
        chat.render(model("llada"), ASK, chat_template="file.jinja")


@pytest.mark.parametrize(
    ("template", "reported"),
    [
        (
            "{{ raise_exception('Only  user\nroles!') }}",
            "take this conversation: Only user roles; ch",
        ),
        ("{{ messages[0].nothing.at_all }}", "has no attribute 'nothing'; change the messages or"),
        ("{% for %}", "take this conversation: Expected an expression"),
    ],
)
def test_a_template_that_refuses_is_one_line(model, template, reported):
    with pytest.raises(
        ValueError, match=r"^the chat template of model 'org/sdar-8B-Chat'"
    ) as caught:
        chat.render(model("sdar", chat_template=template), ASK)
    assert reported in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("message", "reported"),
    [
        (
            {"role": "critic", "content": "4"},
            "message 1 has role 'critic'; .* takes system, user, assis",
        ),
        ({"content": "4"}, "message 1 has role None"),
        ({"role": "user"}, "message 1 has content=None; .* takes text"),
        (
            {"role": "user", "content": [{"type": "text", "text": "4"}, {"type": "image"}]},
            "message 1 has content=.* text",
        ),
    ],
)
@pytest.mark.parametrize("family", ["llada", "sdar", "llada2"])
def test_our_templates_take_text_of_three_roles(model, family, message, reported):
    with pytest.raises(ValueError, match=reported):
        chat.render(model(family), [*ASK, message])


# --- chat: models without one ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "org/LLaDA-8B-Base",
        "/data/llada_base",
        "/hub/models--o--L-Base/snapshots/0ab",
        "Base-LLaDA/",
    ],
)
def test_a_base_model_has_no_chat(model, source):
    one = model("llada", source=source)
    assert chat.template_of(one) is None
    with pytest.raises(ValueError, match="is a base model: it has no chat format; use generate"):
        chat.render(one, ASK)


@pytest.mark.parametrize("source", ["org/LLaDA-8B-Instruct", "/base/llada", "org/database-llada"])
def test_other_names_do_not_say_base(model, source):
    assert chat.template_of(model("llada", source=source)).shipped == "llada"


@pytest.mark.parametrize("lacks", ["<|startoftext|>", "<|eot_id|>", "<|start_header_id|>"])
def test_a_vocabulary_without_the_templates_tokens_has_no_chat(model, lacks):
    one = model("llada", [text for text in LLADA if text != lacks])
    with pytest.raises(
        ValueError, match="has no chat template; use generate with a prompt, or give"
    ):
        chat.render(one, ASK)


def test_a_llama_without_a_template_has_no_chat(model):
    assert chat.template_of(model("llama", LLAMA)) is None


# --- through load, LLM and the command line -------------------------------------------------------


@pytest.fixture(scope="module")
def talker(random_folder, tmp_path_factory):
    """A small SDAR with SDAR's mess: the mask unnamed in config.json, misnamed by the tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "sdar-tiny"
    shutil.copytree(random_folder, folder, ignore=shutil.ignore_patterns("*token*", "*template*"))
    config = json.loads((folder / "config.json").read_text())
    del config["mask_token_id"]
    config |= {"eos_token_id": ids_of(CHATML)["<|im_end|>"], "pad_token_id": FIRST}
    put(folder, "config.json", config)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return split(folder, (*CHATML[:3], "<MASK>"), mask_token="<|MASK|>", eos_token="<|im_end|>")


def test_a_loaded_model_knows_its_mask_limit_and_ends(talker):
    loaded = dj.load(talker)
    mask = FIRST + 3
    assert (loaded.config.mask_token_id, loaded.defaults.vocab_limit) == (mask, mask + 1)
    assert loaded.defaults.stop_token_ids == (ids_of(CHATML)["<|im_end|>"],)
    assert (loaded.tokenizer.mask_token, loaded.tokenizer.mask_token_id) == ("<MASK>", mask)
    assert loaded.tokenizer is loaded.tokenizer


@pytest.mark.slow
def test_a_conversation_goes_through_the_familys_template(talker):
    llm = dj.LLM(str(talker), max_num_seqs=1, max_model_len=192, page_size=8, warm_up=False)
    wild = dj.SamplingParams(max_tokens=64, temperature=9.0, seed=1, ignore_eos=True)
    with pytest.warns(UserWarning, match="using dllm_jax's qwen3.jinja, the sdar family's"):
        (out,) = llm.chat(ASK, wild, use_tqdm=False, enable_thinking=False)
    assert out.prompt == QWEN3_ASK + "<think>\n\n</think>\n\n"
    start, end = ids_of(CHATML)["<|im_start|>"], ids_of(CHATML)["<|im_end|>"]
    assert [i for i in out.prompt_token_ids if i >= FIRST] == [start, end, start]
    # Of 512 rows 266 are tokens; all but the mask are drawn from.
    drawn = out.outputs[0].token_ids
    assert len(drawn) == 64
    assert max(drawn) < FIRST + 3 == llm.model.config.mask_token_id
    with pytest.raises(ValueError, match=r"tools\[0\].function=None is no function"):
        llm.chat(ASK, wild, tools=[{}])


def test_the_command_tells_of_the_template_and_switches_thinking(
    talker, tmp_path, capsys, monkeypatch
):
    seen = []
    render = chat.render
    monkeypatch.setattr(chat, "render", lambda *a, **k: seen.append(render(*a, **k)) or seen[-1])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: "/exit")
    assert main(["chat", "--model", str(talker), "--thinking", "off"]) == 0
    assert seen[-1].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert capsys.readouterr().err == (
        f"note: {talker} has no chat template in its files; using dllm_jax's qwen3.jinja, the sdar "
        "family's\n"
    )
    put(tmp_path, "own.jinja", OWN)
    own = ["--chat-template", str(tmp_path / "own.jinja")]
    assert main(["chat", "--model", str(talker), *own]) == 0
    assert (seen[-1], capsys.readouterr().err) == ("[user|?]", "")
    assert main(["chat", "--model", str(talker), *own, "--thinking", "on"]) == 1
    assert "does not read enable_thinking" in capsys.readouterr().err
    assert main(["chat", "--model", str(talker), "--chat-template", "nowhere.jinja"]) == 1
    assert "chat template 'nowhere.jinja' cannot be read" in capsys.readouterr().err


LOSSY = {
    "a normalizer drops": lambda one: setattr(one, "normalizer", normalizers.StripAccents()),
    "a pattern melts": lambda one: setattr(
        one, "normalizer", normalizers.Replace(Regex("a+"), "a")
    ),
    "a string melts": lambda one: setattr(one, "normalizer", normalizers.Replace("aa", "a")),
    "a split drops": lambda one: setattr(
        one, "pre_tokenizer", pre_tokenizers.Split("a", "removed")
    ),
    "a text is cut": lambda one: one.enable_truncation(4),
    "bytes are unknown": lambda one: setattr(one, "model", models.BPE({"a": 0}, [])),
    "words are unknown": lambda one: setattr(one, "model", models.WordLevel({"a": 0}, "a")),
}


def bounded(kind, takes_space=False):
    """A tokenizer whose tokens stand for a bounded text."""
    if kind == "bytes":
        one = Tokenizer(models.BPE(VOCAB, MERGES))
        one.pre_tokenizer = pre_tokenizers.ByteLevel()
        one.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    else:
        names = [*(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "▁a", "aa"]
        vocab = {name: i for i, name in enumerate(names)}
        one = Tokenizer(models.BPE(vocab, [("▁", "a"), ("a", "a")], byte_fallback=True))
        one.normalizer = normalizers.Replace(" ", "▁")
        one.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits()])
    one.add_tokens([AddedToken("<m>", lstrip=takes_space, normalized=False)])
    return one


@pytest.mark.parametrize("takes_space", [True, False])
@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_item_2_no_token_stands_for_more_than_the_longest(kind, takes_space):
    backend = bounded(kind, takes_space)
    found = reach(SimpleNamespace(backend_tokenizer=backend))
    assert found.takes_space is takes_space
    assert 4 <= found.longest <= 50

    @settings(max_examples=200, deadline=None, database=None)
    @given(st.text(max_size=60) | st.text("a \n\u0345\u0301\u03c9<m>hello w", max_size=300))
    def run(text):
        assert len(backend.encode(text).ids) * found.longest >= found.size(text)

    run()


@pytest.mark.parametrize("name", LOSSY)
def test_item_2_nothing_is_known_of_tokenizers_that_drop_text(name):
    backend = bounded("bytes")
    LOSSY[name](backend)
    assert reach(SimpleNamespace(backend_tokenizer=backend)) is None
