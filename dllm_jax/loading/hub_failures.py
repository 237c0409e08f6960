"""Why a download from the Hugging Face hub failed: a table of failures, each with its remedy."""

import errno
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

_FULL = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
_OF_RUST = re.compile(r"\(os error (\d+)\)")  # hf_xet's form of an errno
_VAGUE = ("LocalEntryNotFoundError", "DryRunError")  # their cause says more


class _Failure(NamedTuple):
    """The properties of an exception and its causes that decide on the message."""

    kinds: frozenset[str]  # class names of every cause, bases included
    modules: frozenset[str]  # top-level packages of the causes' classes
    codes: frozenset[int]  # errno
    status: int  # HTTP status of the hub's answer, 0 without an answer


# The first matching row gives the message: value, rule and remedy in one line.
_Row = tuple[Callable[[_Failure], bool], str]

_ROWS: tuple[_Row, ...] = (
    (
        lambda f: "OfflineModeIsEnabled" in f.kinds,
        "{who} is no folder here and not, or not whole, in the cache {cache!r}, and HF_HUB_OFFLINE "
        "is set; unset it to download, or give a folder",
    ),
    (
        lambda f: "GatedRepoError" in f.kinds,
        "{who} is gated; accept its terms at {hub}/{name} and log in with that account "
        "(`hf auth login`, or a token in HF_TOKEN)",
    ),
    (
        lambda f: "RevisionNotFoundError" in f.kinds,
        "revision={revision!r} is no branch, tag or commit of {name!r}; {hub}/{name}/tree/main "
        "lists them",
    ),
    (
        lambda f: "RepositoryNotFoundError" in f.kinds,
        "{who} is no folder here and no repository at {hub} that you may see; check the name, or "
        "log in where it is private (`hf auth login`, or a token in HF_TOKEN)",
    ),
    (
        lambda f: "HFValidationError" in f.kinds,
        "{who} is no folder here and no hub id ({reason}); give org/name",
    ),
    (
        lambda f: f.status == 401,
        "{who}: {hub} refuses the token it was sent; log in anew (`hf auth login`), or correct or "
        "unset HF_TOKEN",
    ),
    (
        lambda f: f.status == 403,
        "{who}: {hub} forbids it to the token it was sent; give the token the right to read it",
    ),
    (
        lambda f: f.status > 0,
        "{who}: {hub} answers {status} ({reason}); try again later, finished files stay in the "
        "cache",
    ),
    (
        lambda f: bool(f.codes & {*_FULL}),
        "{who}: the disk of the cache {cache!r} is full; free some, or set HF_HOME to a folder "
        "elsewhere",
    ),
    (
        lambda f: bool(f.codes & {*_READ_ONLY}),
        "{who}: the cache {cache!r} cannot be written ({reason}); set HF_HOME to a folder that can",
    ),
    (
        lambda f: bool(f.modules & {"httpx", "httpx2"}),  # the library's HTTP client, by version
        "{who} is no folder here and {hub} cannot be reached ({reason}); check the connection "
        "(HTTPS_PROXY, HF_ENDPOINT) and try again, or download it elsewhere and give its folder",
    ),
    (
        lambda f: True,
        "{who} could not be fetched ({reason}); try again, finished files stay in the cache "
        "{cache!r}",
    ),
)


def described(error: BaseException, who: str, name: str, revision: str) -> str:
    """One line on a failed download.

    The library reports one failure by several exceptions, and the reason is often in a cause.

    Args:
        who: The repository in words.
        name: `org/name`.
    """
    from huggingface_hub import constants

    failure = _failure(error)
    text = next(text for matches, text in _ROWS if matches(failure))
    return text.format(
        who=who,
        name=name,
        revision=revision,
        hub=constants.ENDPOINT,
        cache=constants.HF_HUB_CACHE,
        reason=_reason(next((c for c in _chain(error) if type(c).__name__ not in _VAGUE), error)),
        status=failure.status,
    )


def _failure(error: BaseException) -> _Failure:
    causes = list(_chain(error))
    answers = [getattr(cause, "response", None) for cause in causes]
    return _Failure(
        kinds=frozenset(kind.__name__ for cause in causes for kind in type(cause).__mro__),
        modules=frozenset(type(cause).__module__.partition(".")[0] for cause in causes),
        codes=frozenset(code for cause in causes for code in _codes(cause)),
        status=next((answer.status_code for answer in answers if answer is not None), 0),
    )


def _codes(cause: BaseException) -> Iterator[int]:
    if isinstance(cause, OSError) and cause.errno:
        yield cause.errno
    yield from map(int, _OF_RUST.findall(str(cause)))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and its causes."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
