"""Make `diffusion_gemma.json` of transformers' recorded answers.

    python tests/golden/make_diffusion_gemma_golden.py ORACLE.py RECORDED.npz

ORACLE.py injects the randomness of `oracles/canvas_cases.py` into the generation of transformers
5.23 and records it (`golden FILE`); what is kept is each row's text, finish reason and steps. That
our NumPy draws the same weights and numbers is checked here.
"""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np

from tests.oracles import canvas_cases

KEPT = ("name", "canvas", "gain", "seed", "gen", "rows", "greedy", "inverse", "seed_canvas")


def main(oracle_path: str, recorded: str) -> None:
    spec = importlib.util.spec_from_file_location("oracle", oracle_path)
    assert spec is not None
    assert spec.loader is not None
    oracle = importlib.util.module_from_spec(spec)
    sys.modules["oracle"] = oracle
    spec.loader.exec_module(oracle)
    known = {case.name: case for case in (*oracle.CASES, *oracle.eos_cases())}
    file = np.load(recorded)
    kept = []
    for one in json.loads(bytes(file["meta"]))["cases"]:
        text, seed = oracle.text_config(one["text"]), known[one["name"]].draw_seed
        case = {**{name: one[name] for name in KEPT}, "text": text, "draw_seed": seed}
        own = canvas_cases.weights(case)
        assert oracle.digest(*[own[name] for name in sorted(own)]) == one["weights"], one["name"]
        drawn = canvas_cases.draws(case | {"seed_canvas": None})
        for name, value in drawn._asdict().items():
            if f"{one['key']}/{name}" in file:
                np.testing.assert_array_equal(value, file[f"{one['key']}/{name}"])
        kept.append(case)
    canvas_cases.GOLDEN.write_text("[\n" + ",\n".join(map(json.dumps, kept)) + "\n]\n")
    print(f"{len(kept)} cases, {Path(canvas_cases.GOLDEN).stat().st_size} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
