"""What we call of transformers, whose own `__init__` imports every model: half of the time."""

from typing import Any

PreTrainedTokenizerFast: Any
Qwen2Tokenizer: Any
