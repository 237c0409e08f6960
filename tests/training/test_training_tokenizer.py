"""Proves the tokenizer: splits as stated, loses nothing, and loads through transformers as is."""

import pathlib
import warnings

import pytest
import transformers

from dllm_jax.tasks import problems
from dllm_jax.training import stream, tokenizer

pytestmark = pytest.mark.long

FOLDER = pathlib.Path(tokenizer.__file__).parent.parent / "builtin" / "tiny-sdar"


@pytest.fixture(scope="module")
def shipped() -> transformers.PreTrainedTokenizerBase:
    with warnings.catch_warnings():  # transformers 5 frowns on `rope_scaling` in config.json
        warnings.simplefilter("ignore", FutureWarning)
        return transformers.AutoTokenizer.from_pretrained(FOLDER)


def test_digits_stand_alone_and_words_carry_their_space(shipped) -> None:
    ids = shipped.encode(" In all of the days that makes 30 * 6 = 180.")
    assert [shipped.decode([i]) for i in ids] == [
        " In", " all", " of", " the", " days", " that", " makes", " ", "3", "0", " *", " ", "6",
        " =", " ", "1", "8", "0", ".",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["Zoë paid 5 €,\n\tthen left.", "日本 12", "a  b   c", " 100%"])
def test_any_text_round_trips(shipped, text: str) -> None:
    assert shipped.decode(shipped.encode(text)) == text


def test_specials_have_fixed_ids(shipped) -> None:
    assert shipped.convert_tokens_to_ids(list(tokenizer.SPECIALS)) == [0, 1, 2, 3, 4]
    assert (shipped.pad_token_id, shipped.mask_token_id, shipped.eos_token_id) == (0, 1, 2)
    assert len(shipped) == 768


def test_the_chat_template_is_the_training_format(shipped) -> None:
    problem = problems.problem("hard", 0, 0)
    user = {"role": "user", "content": problem.question}
    prompt = shipped.apply_chat_template([user], add_generation_prompt=True, tokenize=False)
    assert prompt == stream.conversation(problem.question)
    assert prompt == f"<|user|>{problem.question}<|assistant|>"
    turn = [user, {"role": "assistant", "content": problem.response}]
    whole = shipped.apply_chat_template(turn, tokenize=False)
    assert whole == stream.conversation(problem.question, problem.response)
    assert shipped.encode(whole)[-1] == shipped.eos_token_id


@pytest.mark.slow
def test_training_it_again_gives_the_shipped_one(shipped) -> None:
    texts = [problems.problem(half, 9, i) for i in range(10_000) for half in problems.HALVES]
    again = tokenizer.train_tokenizer((p.question + p.response for p in texts), 768)
    assert again.get_vocab() == shipped.get_vocab()
