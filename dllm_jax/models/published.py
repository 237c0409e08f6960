"""Published configs by hub name, for `random:NAME`: real sizes without real weights.

Source: config.json of these repositories on the Hugging Face hub, entries that say nothing of the
network or of its tokens left out. What could not be seen: theta of DreamReasoner and LLaDA2.2-mini,
whether SDAR-1.7B's head is tied (its siblings' are not), the length of DMax-16B and of the drafter,
theta of iLLaDA and LLaDA-MoE, and the mask id of Open-dCoder.
"""

import json
from pathlib import Path
from typing import Any

_EVERY = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
PUBLISHED: dict[str, dict[str, Any]] = {
    name: one["config"] for one in _EVERY for name in one["names"]
}
