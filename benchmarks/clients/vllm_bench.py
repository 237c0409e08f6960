"""Runs `vllm bench serve` from the unmodified benchmark files of vLLM's wheel; the rest is stubs.

    VLLM=FOLDER python vllm_bench.py --backend openai-chat ...

FOLDER holds `vllm/benchmarks` of the wheel. The rest of vllm would need torch and a GPU.
"""

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import types
from unittest.mock import MagicMock

ROOT = os.environ["VLLM"]


def stub(module):
    """What the benchmark files use of a module of vllm."""
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    given = {
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.utils.argparse_utils": {"FlexibleArgumentParser": argparse.ArgumentParser},
        "vllm.utils.gc_utils": {"freeze_gc_heap": lambda: None},
        "vllm.utils.network_utils": {"join_host_port": lambda host, port: f"{host}:{port}"},
        "vllm.utils.mistral": {"is_mistral_tokenizer": lambda tokenizer: False},
        "vllm.utils.import_utils": {"PlaceholderModule": MagicMock},
        "vllm.lora.request": {"LoRARequest": type("LoRARequest", (), {})},
        "vllm.inputs": {"MultiModalDataDict": dict},
        "vllm.tokenizers": {
            "get_tokenizer": lambda name, **_: AutoTokenizer.from_pretrained(name),
            "TokenizerLike": PreTrainedTokenizerBase,
        },
    }
    vars(module).update(given.get(module.__name__, {}))


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of vllm but its benchmarks."""

    def find_spec(self, name, path, target=None):
        if name == "vllm" or (name.startswith("vllm.") and not name.startswith("vllm.benchmarks")):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = [os.path.join(ROOT, *spec.name.split("."))]

        def missing(name):
            if name.startswith("__"):
                raise AttributeError(name)
            return MagicMock(name=f"{spec.name}.{name}")

        module.__getattr__ = missing
        return module

    def exec_module(self, module):
        stub(module)


sys.meta_path.insert(0, Stubs())
if importlib.util.find_spec("pybase64") is None:
    sys.modules["pybase64"] = importlib.import_module("base64")

from vllm.benchmarks import serve  # noqa: E402

parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
