"""Proves what is made of lm-evaluation-harness's tasks, against a double of the harness.

The double has what `dllm_jax.tasks.harness` calls. A real run is described in docs/lm_eval.md.
"""

import sys
import types

import pytest

import dllm_jax as dj
from dllm_jax.tasks.harness import read_tasks


class Filters:
    """Takes the last word."""

    name = "last"

    def apply(self, instances):
        for one in instances:
            one.filtered_resps[self.name] = one.resps[0].split()[-1]


class Task:
    """Two questions whose answer is 4."""

    def __init__(self, kind="generate_until"):
        self.OUTPUT_TYPE, self._filters, self.set = kind, [Filters()], {}

    def set_config(self, name, value):
        self.set[name] = value

    def set_fewshot_seed(self, seed):
        self.set["seed"] = seed

    def build_all_requests(self, *, limit, rank, world_size, apply_chat_template, chat_template):
        assert (rank, world_size, apply_chat_template) == (0, 1, True)
        texts = [[{"role": "user", "content": f"{n} + {4 - n}?"}] for n in (1, 2)][:limit]
        how = {"until": ["\n"]}
        self.instances = [
            types.SimpleNamespace(
                args=(chat_template(text, True), how), doc={"answer": "4"}, filtered_resps={}
            )
            for text in texts
        ]

    def doc_to_target(self, doc):
        return doc["answer"]

    def process_results(self, doc, results):
        return {"exact_match": float(results == [doc["answer"]]), "other": 0.0}


pytestmark = pytest.mark.usefixtures("no_compile_cache")


@pytest.fixture
def tasks(monkeypatch):
    found = {"sums": Task(), "choice": Task("multiple_choice"), "group": {"inner": Task()}}
    module = types.ModuleType("lm_eval.tasks")
    vars(module).update(
        TaskManager=lambda **_: types.SimpleNamespace(all_tasks=[*found]),
        get_task_dict=lambda names, _: {name: found[name] for name in names},
    )
    monkeypatch.setitem(sys.modules, "lm_eval", types.ModuleType("lm_eval"))
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", module)
    return found


def test_a_task_is_problems_with_its_prompts_and_its_judge(random_folder, tasks):
    model = dj.load(random_folder)
    sets = read_tasks(model, ["sums", "group"], num_fewshot=3)
    assert list(sets) == ["sums", "inner"]
    assert tasks["sums"].set == {"num_fewshot": 3, "seed": 1234}
    of = sets["sums"]
    assert [one.answer for one in of.problems] == ["4", "4"]
    assert of.prompts is not None
    assert "1 + 3?" in model.tokenizer.decode(of.prompts[0])
    assert of.is_right("it is 4", of.problems[0])
    assert of.is_right("it is 4\nand 5", of.problems[1])  # what follows `until` is not judged
    assert not of.is_right("it is 5", of.problems[0])
    (one,) = read_tasks(model, ["sums"], limit=1).values()
    assert len(one.problems) == 1


def test_what_is_no_task_that_generates_is_refused(random_folder, tasks, tmp_path):
    model = dj.load(random_folder)
    with pytest.raises(ValueError, match="multiple_choice, which no threshold changes"):
        read_tasks(model, ["choice"])
    with pytest.raises(ValueError, match=f"there is no task 'nothing' in {tmp_path}"):
        read_tasks(model, ["nothing"], folder=str(tmp_path))


def test_without_the_harness_the_error_names_the_package(random_folder, fails, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    said = fails(1, "eval", "--model", str(random_folder), "--tasks", "gsm8k")
    assert "pip install 'lm-eval>=0.4.9'" in said
