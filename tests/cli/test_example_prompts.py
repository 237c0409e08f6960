"""Proves that a newcomer who tries a prompt of ours gets the right answer (issue 50).

Every word problem that a page, the README, an example or `--help` puts to a built-in model is asked
as it stands there, and so are those that the server's page offers.
"""

import re
from pathlib import Path

import pytest

import dllm_jax as dj
from dllm_jax.cli.entry import EXAMPLES
from dllm_jax.serve.examples import QUESTIONS
from tests.api.test_llm import CONFIG, STRATEGY

ROOT = Path(__file__).resolve().parents[2]
OF_TRAINED = "Nora has 400 apples"  # for models that a reader has trained on sums
ANSWERS = QUESTIONS | {
    "A shop has 365 plates. People bring 132 back. How many plates are there?": "497",
    "A shop has 365 plates. People bring 132 back. How many are there?": "497",
    "A factory has 5 machines. Each machine makes 9 cups an hour. They run for 8 hours. "
    "Of these cups, 50 are bad. How many good ones are there?": "310",
    "Ben earns 37 dollars a day and spends 29 dollars of it. Ben does this for 5 days. "
    "How many dollars does Ben have then?": "40",
    "Fay earns 49 dollars a day and spends 8 dollars of it. Fay does this for 9 days. "
    "How many dollars are there in the end?": "369",
    "Each day Anna gets 29 dollars and pays 13 dollars. This goes on for 9 days. "
    "How many dollars are there in the end?": "144",
}


def prompts():
    """Word problems in quotes, with their place; Python's parts of a string are joined."""
    texts = {"--help": "\n".join(line for lines in EXAMPLES.values() for line in lines)}
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]
    texts |= {page.name: page.read_text(encoding="utf-8") for page in pages}
    for name, text in texts.items():
        joined = re.sub(r'"\n\s*(?:question \+= |QUESTION \+= )?"', "", text)
        for found in re.findall(r'"(?:<\|user\|>)?([A-Z][^"<]*How [^"<?]*\?)', joined):
            if not found.startswith(OF_TRAINED):
                yield name, found


def test_every_example_prompt_has_an_answer_here():
    found = list(prompts())
    unknown = {place: text for place, text in found if text not in ANSWERS}
    assert not unknown
    assert len(found) >= 12
    assert {"--help", "http.md", "quickstart.md", "trace.md"} <= {place for place, _ in found}


@pytest.mark.long
def test_the_built_in_model_answers_every_example_prompt():
    llm = dj.LLM("builtin:tiny-sdar", STRATEGY, config=CONFIG, warm_up=False)
    chats = [[{"role": "user", "content": text}] for text in ANSWERS]
    told = llm.chat(chats, dj.SamplingParams(max_tokens=160), use_tqdm=False)
    texts = [one.outputs[0].text for one in told]
    wrong = {
        question: text
        for (question, answer), text in zip(ANSWERS.items(), texts, strict=True)
        if not text.endswith(f"The answer is {answer}.")
    }
    assert not wrong
