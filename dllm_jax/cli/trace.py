"""`dllm-jax trace`: how a text was denoised, as a page, as pictures, or as JSON.

Data flow: command line -> prompt -> token ids -> `record` -> page, pictures or JSON -> a file that
is whole or not there. The tokens are those of `generate` with the same flags.
"""

import argparse
import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dllm_jax.cli import flags
from dllm_jax.cli import strategy as strategies
from dllm_jax.cli.errors import UsageError
from dllm_jax.cli.files import check_output
from dllm_jax.cli.flags import Group, flag, whole
from dllm_jax.cli.generate import draw_problem
from dllm_jax.cli.interrupt import ALL, Interrupt
from dllm_jax.cli.text import count

PAGE = "trace.html"
FORMS = (".html", ".json", ".png")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
    parser.epilog = (
        "The page needs no network and no other file. A prompt for a model with a chat template "
        "is sent as one user message; --raw sends it as it is. Without a prompt a built-in model "
        "gets a held-out word problem drawn by --seed."
    )
    flags.add(
        parser,
        Group("", flags.PROMPT, flags.RAW, flags.HALF),
        flags.MODEL,
        flags.strategy("repeat it to see several side by side on one page (default: the model's)"),
        flags.DRAFT,
        flags.sampling(flags.SEED_OR_PROBLEM, stops=False),
        Group("", flags.ATTENTION),
        Group(
            "output",
            flag(
                "--output --out PATH",
                "FILE.html, the page; FILE.json, the record; FILE.png, a picture of one step; "
                f"FOLDER/, a picture of each (default: {PAGE})",
            ),
            flag(
                "--step N",
                "which step FILE.png shows; 0 is before the first (default: the last)",
                whole(0),
            ),
            flags.as_json("print the record, write nothing"),
        ),
    )
    parser.set_defaults(prompt_file=None)


def run(args: argparse.Namespace, stop: Interrupt) -> int:
    """Decode, write, and say where it is."""
    stop.forced = ALL
    out = _checked_out(args)
    problem = draw_problem(args)
    prompt = problem.question if problem else _read_prompt(args)
    choices = _load_strategies(args)

    from dllm_jax.cli.engine import sampling_params
    from dllm_jax.cli.prompts import encode
    from dllm_jax.cli.sources import load_model

    model = load_model(args)
    ids = encode(model, prompt, args.raw)
    decoders = []
    for _, spec, value, fields in choices:
        strategy = strategies.resolve(model, spec, value, fields, args.draft)
        longest = len(ids) + args.max_tokens
        decoders.append(strategies.fit_window(model, strategy, fields, longest))
    drafts = _drafts(args, decoders)
    with stop.held():
        made = []
        for strategy, draft in zip(decoders, drafts, strict=True):
            params = sampling_params(args, model, strategy)
            made.append(_record(args, model, ids, strategy, draft, params))
            stop.check()
    if len(made) > 1:
        labels = (label for label, *_ in choices)
        made = [
            dataclasses.replace(one, strategy=label)
            for one, label in zip(made, labels, strict=True)
        ]
    if args.json:
        print(made[0].to_json(), flush=True)
        return 0
    written = _write(args, out, made, model.tokenizer)
    for one in made:
        name = f", {one.strategy}" if len(made) > 1 else ""
        rate = len(one.tokens) / max(one.nfe, 1)
        print(
            f"{written}{name}: {count(len(one.tokens), 'token')}, {count(one.nfe, 'forward')}, "
            f"{rate:.2f} tokens per forward, {one.finish_reason}"
        )
    if errors := [one.error for one in made if one.error]:
        raise ValueError(f"the text ended with an error: {errors[0]}")
    return 0


def _load_strategies(args: argparse.Namespace) -> list[Any]:
    """Label, spec, strategy value and fields of each; spec and value are None for the model's."""
    fields = strategies.given_fields(args)
    if not args.strategy:
        return [("", None, None, fields)]
    if len(args.strategy) > 1:
        return strategies.load_several(args.strategy, fields)
    (label,) = args.strategy
    spec, own = strategies.split(label)
    return [(label, spec, strategies.load(spec), fields | own)]


def _drafts(args: argparse.Namespace, decoders: list[Any]) -> list[str | None]:
    """The draft of each strategy; of several, only those that need one get it."""
    if len(decoders) == 1:
        return [args.draft]
    drafts = [args.draft if one.needs.aux else None for one in decoders]
    if args.draft is not None and not any(drafts):
        raise UsageError(
            f"--draft {args.draft!r}: none of {', '.join(args.strategy)} drafts; "
            "add --strategy dflash"
        )
    return drafts


class _Out(NamedTuple):
    """Where the output goes; a folder may be new, and be called like a file."""

    path: Path
    is_folder: bool

    @property
    def form(self) -> str:
        """The form of a file, one of `FORMS`; "" for a folder."""
        return "" if self.is_folder else self.path.suffix.lower()


def _checked_out(args: argparse.Namespace) -> _Out:
    """Where the output goes, refused before the work where it could not be written after it."""
    if args.stop:
        raise UsageError("--stop is text and a trace is of tokens; use --stop-token-ids")
    if len(args.strategy or ()) > 1 and (args.json or not (args.output or PAGE).endswith(".html")):
        raise UsageError("several strategies stand on one page; use --out FILE.html")
    if args.half and args.prompt is not None:
        raise UsageError("--half is about problems drawn by --seed; leave out it or the prompt")
    if args.json and args.output is not None:
        raise UsageError("--json prints and --out writes; give one, or --out FILE.json")
    name = PAGE if args.output is None else args.output
    if not name:
        raise UsageError(f"--out is empty; name a file or a folder, or leave it out for {PAGE}")
    out = _Out(Path(name), name.endswith(("/", os.sep)) or Path(name).is_dir())
    if not out.is_folder and out.form not in FORMS:
        raise UsageError(
            f"--out {name!r} is no FILE{', FILE'.join(FORMS)} and no folder; name one of these "
            "files, or a new folder with / behind it"
        )
    if args.step is not None and out.form != ".png":
        raise UsageError(f"--step goes with --out FILE.png, and --out is {name!r}; leave it out")
    if not args.json:
        check_output(name, "--out", is_folder=out.is_folder)
    return out


def _read_prompt(args: argparse.Namespace) -> str:
    from dllm_jax.cli.prompts import read_prompts

    return read_prompts(args)[0]


def _record(
    args: argparse.Namespace,
    model: Any,
    ids: list[int],
    strategy: Any,
    draft: str | None,
    params: Any,
) -> Any:
    import jax

    from dllm_jax.trace.recording import record

    return record(
        model,
        ids,
        strategy,
        max_tokens=params.max_tokens,
        **params.sampling._asdict(),
        stop_token_ids=params.stop_token_ids,
        max_nfe=params.max_nfe,
        draft=draft,
        key=jax.random.key(args.seed or 0),
        attention_implementation=args.attention_implementation,
    )


def _write(args: argparse.Namespace, to: _Out, made: list[Any], tokenizer: Any) -> str:
    """Write the form that the path names; what to say of it."""
    out, trajectory = to.path, made[0]
    if to.is_folder:
        return _write_folder(out, trajectory, tokenizer)
    if to.form == ".png":
        return _write_picture(out, args.step, trajectory, tokenizer)
    if to.form == ".json":
        text = trajectory.to_json() + "\n"
    else:
        from dllm_jax.trace.page import render_page

        text = render_page(made, tokenizer)
    with _whole(out) as part:
        part.write_text(text, encoding="utf-8")
    return str(out)


def _write_picture(out: Path, step: int | None, trajectory: Any, tokenizer: Any) -> str:
    from dllm_jax.trace.picture import render_pictures

    last = len(trajectory.steps)
    wanted = last if step is None else step
    if wanted > last:
        raise UsageError(
            f"--step {wanted}: the text took {count(last, 'step')}; give one in [0, {last}]"
        )
    pictures = enumerate(render_pictures(trajectory, tokenizer))
    picture = next(picture for number, picture in pictures if number == wanted)
    with _whole(out) as part:
        picture.save(part, "PNG")
    return f"{out}, step {wanted} of {last}"


def _write_folder(out: Path, trajectory: Any, tokenizer: Any) -> str:
    from dllm_jax.trace.picture import render_pictures

    out.mkdir(exist_ok=True)
    for number, picture in enumerate(render_pictures(trajectory, tokenizer)):
        with _whole(out / f"step-{number:04}.png") as part:
            picture.save(part, "PNG")
    return f"{out}, {count(len(trajectory.steps) + 1, 'picture')}"


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A file next to `path` that takes its place once it is written; gone where that fails."""
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(number)
    part = Path(name)
    try:
        yield part
        mask = os.umask(0)
        os.umask(mask)
        part.chmod(0o666 & ~mask)  # as an ordinary new file; mkstemp's is its owner's alone
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
