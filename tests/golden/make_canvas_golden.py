"""Makes `canvas_passes.npz`: float64 answers of single passes of tiny DiffusionGemmas.

Run by hand where the oracle is; the tests read its output alone. The oracle's NumPy half was
compared with transformers 5.23, at most 3e-4 apart in float32 (`extended` there):

    python -m tests.golden.make_canvas_golden ../shared/oracles/diffusion_gemma_oracle.py

Stored are, for each shape, gain and prompt length: prompt, canvas, the law of the step before, what
was expected of it, the encoder's last rows, and the canvas's logits without and with conditioning;
and a run of three canvases.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np

from tests.oracles.canvas_files import SHAPES, config_of, random_tensors

GAINS = (0.4, 1.0)
SEED = 5
FORCED, FORCED_CANVASES, FORCED_STEPS = "base", 3, 4


def lengths(window: int) -> tuple[int, ...]:
    """Prompts below, at and above a window."""
    return tuple(sorted({1, max(window - 2, 1), window - 1, window, window + 1, 3 * window}))


def forced(module) -> dict[str, np.ndarray]:
    """Three canvases of a strong net, each step's inputs given: of chaos no error is left to grow.

    A canvas shows its likeliest ids in every other cell next, is conditioned on the step before at
    the schedule's temperature, and its last likeliest text is committed.
    """
    text = config_of(FORCED)["text_config"]
    vocab, size = text["vocab_size"], SHAPES[FORCED][1]
    reference = module.RefModel(random_tensors(FORCED, SEED, 1.0), text)
    rng = np.random.default_rng(12)
    prompt = rng.integers(3, vocab - 4, 5)
    _, cache = reference.encode(prompt)
    canvases, expected, logits, texts = [], [], [], []
    for _ in range(FORCED_CANVASES):
        before, shown = None, rng.integers(0, vocab, size)
        for step in range(FORCED_STEPS):
            given = np.zeros((size, text["hidden_size"]))
            expected.append(given if before is None else reference.soft(before))
            canvases.append(shown)
            logits.append(reference.decode(shown, cache, before))
            before = logits[-1] / (0.4 + 0.4 * (FORCED_STEPS - step) / FORCED_STEPS)
            kept = np.arange(size) % 2 == step % 2
            shown = np.where(kept, logits[-1].argmax(-1), rng.integers(0, vocab, size))
        texts.append(logits[-1].argmax(-1))
        _, cache = reference.encode(texts[-1], cache)
    return {
        "forced/prompt": prompt.astype(np.int32),
        "forced/canvas": np.stack(canvases).astype(np.int32),
        "forced/expected": np.stack(expected).astype(np.float32),
        "forced/logits": np.stack(logits).astype(np.float32),
        "forced/text": np.stack(texts).astype(np.int32),
    }


def main(oracle: Path) -> None:
    """Write the file."""
    spec = importlib.util.spec_from_file_location("oracle", oracle)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["oracle"] = module
    spec.loader.exec_module(module)
    arrays = {}
    for shape, (_, canvas_length) in SHAPES.items():
        text = config_of(shape)["text_config"]
        vocab = text["vocab_size"]
        for gain in GAINS:
            reference = module.RefModel(random_tensors(shape, SEED, gain), text)
            rng = np.random.default_rng(11)
            for n in lengths(text["sliding_window"]):
                ids, canvas = rng.integers(3, vocab - 4, n), rng.integers(0, vocab, canvas_length)
                before = rng.normal(0, 3, (canvas_length, vocab))
                rows, cache = reference.encode(ids)
                at = f"{shape}/{gain}/{n}/"
                arrays |= {
                    at + "ids": ids.astype(np.int32),
                    at + "canvas": canvas.astype(np.int32),
                    at + "expected": reference.soft(before).astype(np.float32),
                    at + "encoded": rows[-1].astype(np.float32),
                    at + "first": reference.decode(canvas, cache).astype(np.float32),
                    at + "conditioned": reference.decode(canvas, cache, before).astype(np.float32),
                }
    arrays |= forced(module)
    np.savez_compressed(Path(__file__).with_name("canvas_passes.npz"), **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
