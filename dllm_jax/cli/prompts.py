"""Reads the prompts of a command line and turns them into token ids."""

import argparse
import os
import stat
import sys
import warnings
from pathlib import Path
from typing import Any

from dllm_jax.cli.errors import UsageError
from dllm_jax.cli.text import count
from dllm_jax.convert.small_files import MOST_BYTES, read_bytes


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts of a command line: PROMPT, `-` for stdin, or the lines of --prompt-file.

    Raises:
        UsageError: Given twice or not at all, or empty, or to a model that reads no text.
        ValueError: A file that is not there or not UTF-8.
    """
    # Refused before its weights are drawn, which takes minutes.
    if args.model.startswith("random:") and args.tokenizer is None:
        raise UsageError(
            f"model {args.model!r} has no tokenizer to read text with; give one of its family "
            "(--tokenizer), use dj.generate with token ids, or `dllm-jax bench`"
        )
    if args.prompt is not None and args.prompt_file is not None:
        raise UsageError("both PROMPT and --prompt-file are given; give one of them")
    if args.prompt_file is not None:
        lines = _read(args.prompt_file).splitlines()
        prompts = [line for line in lines if line.strip()]
        if not prompts:
            raise UsageError(
                f"prompt file {args.prompt_file!r} holds no prompt; write one on each line"
            )
        return prompts
    if args.prompt is None:
        raise UsageError("no prompt given; give PROMPT, - for stdin, or --prompt-file FILE")
    prompt = _read("-").rstrip("\n") if args.prompt == "-" else args.prompt
    if not prompt.strip():
        raise UsageError("the prompt is empty; give at least one word")
    return [prompt]


def stdin_waits() -> bool:
    """Whether stdin is a pipe or a file with data; does not wait."""
    try:
        import fcntl
        import termios

        fd = sys.stdin.fileno()
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
            return False
        return any(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))
    except (ImportError, AttributeError, OSError, ValueError):  # no stdin, or another system
        return False


def _read(name: str) -> str:
    """Text of a prompt file, or of stdin for "-"."""
    return read_file("prompt file", name)


def read_file(kind: str, name: str) -> str:
    """Text of a file, or of stdin for "-".

    Args:
        kind: What it is, for messages.

    Raises:
        ValueError: It cannot be read or is not UTF-8.
    """
    what = "stdin" if name == "-" else f"{kind} {name!r}"
    if name != "-" and not _is_regular(name):
        raise ValueError(
            f"{what} is a pipe or a device, which might never end; give a regular file, or pipe "
            "the text in and give -"
        )
    if name == "-" and sys.stdin is None:
        raise ValueError("stdin cannot be read: it is closed; give a text or a file")
    try:
        data = sys.stdin.buffer.read(MOST_BYTES + 1) if name == "-" else read_bytes(Path(name))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(f"{what} cannot be read: {reason}; check the path") from error
    if len(data) > MOST_BYTES:
        raise ValueError(f"{what} has more than {MOST_BYTES} bytes; give less at a time")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{what} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}; "
            "save it as UTF-8"
        ) from error


def _is_regular(name: str) -> bool:
    """Whether a name is no pipe and no device; one that is not there, or a folder, fails later."""
    try:
        mode = os.stat(name).st_mode
    except OSError:
        return True
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def encode(model: Any, prompt: str, raw: bool, has_holes: bool = False) -> list[int]:
    """Token ids of a prompt; unless `raw`, as one user message of the chat template, if any.

    A mask token in the prompt is kept as text, with a warning.

    Args:
        has_holes: Mask tokens are holes, without a warning.

    Raises:
        ValueError: A model without a tokenizer, or a prompt too long for the model.
    """
    from dllm_jax.loading import chat
    from dllm_jax.loading.tokenizer import encode as encode_text

    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ValueError(
            f"model {model.source!r} has no tokenizer to read text with; use dj.generate with "
            "token ids"
        )
    is_chat = not raw and chat.template_of(model) is not None
    if is_chat and (note := chat.note(model)):
        warnings.warn(note, stacklevel=2)
    text = chat.render(model, [{"role": "user", "content": prompt}]) if is_chat else prompt
    ids = encode_text(tokenizer, text, special=not is_chat)  # a template writes its own
    if not ids:
        raise ValueError(f"the prompt {prompt!r} has no tokens; give at least one word")
    most = model.config.max_position
    if len(ids) >= most:
        raise ValueError(
            f"the prompt has {count(len(ids), 'token')} but {model.source} takes {most}, prompt "
            "and text together; shorten the prompt"
        )
    mask = model.config.mask_token_id
    if mask in ids and not has_holes:
        print(
            f"warning: the prompt holds the mask token {tokenizer.decode([mask])!r} (id {mask}) "
            f"{count(ids.count(mask), 'time')}; its ids are kept as they are, as text",
            file=sys.stderr,
        )
    return ids


def encode_suffix(model: Any, suffix: str) -> list[int]:
    """Token ids of a suffix, without the token that begins a text."""
    from dllm_jax.loading.tokenizer import encode as encode_text

    return encode_text(model.tokenizer, suffix, special=False)
