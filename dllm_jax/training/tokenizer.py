"""The tokenizer of the tiny models: byte-level BPE trained on the generator's own text.

The pre-tokenizer is Qwen's with single digits: a word with the space before it is one piece, each
digit one piece, a space before a digit one piece. Any UTF-8 text round-trips. A conversation is
written `<|user|>question<|assistant|> response<|eos|>`: the space belongs to the response, so a
prompt ends with `<|assistant|>` and the first token to generate begins with a space.
"""

import json
import pathlib
from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

PAD, MASK, EOS, USER, ASSISTANT = "<|pad|>", "<|mask|>", "<|eos|>", "<|user|>", "<|assistant|>"
SPECIALS = (PAD, MASK, EOS, USER, ASSISTANT)  # ids 0 to 4, in this order
PAD_ID, MASK_ID, EOS_ID = 0, 1, 2
_SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
_MIN_PAIR_COUNT = 100  # an invented word's letter pairs are rarer than this in 20,000 texts
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|assistant|> ' + message['content'] | trim + '<|eos|>' }}"
    "{% else %}{{ '<|user|>' + message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = 768) -> tokenizers.Tokenizer:
    """Byte-level BPE over `texts`.

    Args:
        vocab_size: Most entries. Merging ends at 817, when every common word is one token; 768, a
            round number for the accelerator, splits the rarest words, for 0.5 % more tokens.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=_MIN_PAIR_COUNT,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: tokenizers.Tokenizer, folder: pathlib.Path, max_len: int) -> None:
    """Write the three files from which `transformers.AutoTokenizer` loads it without code."""
    roles = {"pad_token": PAD, "mask_token": MASK, "eos_token": EOS}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_len,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": [USER, ASSISTANT],
        "chat_template": CHAT_TEMPLATE,
        **roles,
    }
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in (
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", roles | {"additional_special_tokens": [USER, ASSISTANT]}),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
