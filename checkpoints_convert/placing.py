"""Atomic creation of a folder: written under a temporary name, and renamed when complete.

A folder with the final name is therefore always complete, and missing write access is found first.
An old folder is replaced only if its `meta.json` says that it is a converted one. A process locks
the folder that it writes, so that a later one recognises and removes leftovers of a killed process.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path

from .report import FORMAT, META
from .tokenizer_files import read_json

_JUST_MADE_S = 60.0  # another process may not yet have locked a folder this young
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def placed(dst: Path, src: Path, *, force: bool) -> Generator[Path, None, None]:
    """A new folder to write to; it replaces `dst` if no exception is raised.

    Args:
        dst: Final path of the folder. A link is followed.
        src: The source, which must not be replaced.
        force: Replace a converted folder.

    Raises:
        FileExistsError: If `dst` exists and may not be replaced.
        OSError: If `dst` cannot be written.
        ValueError: If `src` is `dst` or in it.
    """
    require_place(dst, src, force=force)
    place = dst.resolve()
    made = [folder for folder in place.parents if not folder.exists()]
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _remove_left(place)
        partial = Path(tempfile.mkdtemp(prefix=_prefix(place), dir=place.parent))
    except OSError as error:
        raise OSError(
            f"{str(dst)!r} cannot be made ({error.strerror}: {error.filename}); "
            "choose a destination in a folder that can be written"
        ) from error
    lock = _locked(partial)
    try:
        yield partial
        partial.chmod(0o755)  # mkdtemp makes it private
        _sync(partial)
        _require_free(dst, force)  # it may have appeared while the weights were read
        try:
            _move(partial, place, force)
        except OSError:
            _require_free(dst, force)  # it may have appeared just now
            raise
    except BaseException as error:  # also on Ctrl-C, leave no incomplete folder
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(OSError):  # keep a parent that is no longer empty
            for folder in made:
                folder.rmdir()
        if (full := full_disk(error, dst)) is not None:
            raise full from error
        raise
    finally:
        if lock is not None:
            os.close(lock)


def full_disk(error: BaseException, folder: Path) -> OSError | None:
    """A one-line error if `error` was caused by a full disk, else None.

    Orbax reports a full disk as a ValueError of native code, wrapped in other errors.
    """
    for one in _causes(error):
        text = str(one)
        is_code = isinstance(one, OSError) and one.errno in _NO_SPACE
        if is_code or any(os.strerror(code) in text for code in _NO_SPACE):
            return OSError(
                f"{str(folder)!r} cannot be written: no space is left on its disk; free some, or "
                "choose another folder"
            )
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _prefix(place: Path) -> str:
    return f".{place.name}.partial-"


def _locked(folder: Path) -> int | None:
    """Open and lock a folder until the process ends; None if another process has the lock."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # also a file system without locks
        os.close(descriptor)
        return None
    return descriptor


def _remove_left(place: Path) -> None:
    """Remove leftovers of killed conversions to `place`, and report their names."""
    prefix = _prefix(place)
    for folder in [path for path in place.parent.iterdir() if path.name.startswith(prefix)]:
        with contextlib.suppress(OSError):  # no permission, or already gone
            if time.time() - folder.stat().st_mtime < _JUST_MADE_S:
                continue
            if (lock := _locked(folder)) is None:
                continue
            try:
                shutil.rmtree(folder)
            finally:
                os.close(lock)
            warnings.warn(
                f"removed {str(folder)!r}, which a conversion left that was killed", stacklevel=4
            )


def require_place(dst: Path, src: Path, *, force: bool) -> None:
    """Check without writing whether `dst` may be created; see `placed`."""
    place, source = dst.resolve(), src.resolve()
    if source == place or place in source.parents:
        raise ValueError(f"{str(dst)!r} holds the source {str(src)!r}; choose another destination")
    _require_free(dst, force)


def _require_free(dst: Path, force: bool) -> None:
    """Refuse a `dst` that exists, unless it is empty or a converted folder, and `force` is set."""
    if not dst.exists():
        return
    is_ours = False
    with contextlib.suppress(OSError, ValueError):
        is_ours = read_json(dst / META).get("format") == FORMAT
    if not is_ours and not (dst.is_dir() and not any(dst.iterdir())):
        raise FileExistsError(
            f"{str(dst)!r} exists already and is no converted folder (no {META} of {FORMAT}), and "
            "only those are replaced by force=True (--force); choose another destination, or "
            "delete it"
        )
    if not force:
        raise FileExistsError(
            f"{str(dst)!r} exists already; choose another destination, or replace it with "
            "force=True (--force)"
        )


def _sync(folder: Path) -> None:
    """Flush every file and folder to the disk before the rename."""
    for root, _, files in os.walk(folder):
        for path in (*(Path(root) / name for name in files), Path(root)):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _move(partial: Path, place: Path, force: bool) -> None:
    if not (force and place.exists()):
        partial.rename(place)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{place.name}.old-", dir=place.parent))
    old = aside / place.name
    try:
        place.rename(old)
        partial.rename(place)
    except BaseException:  # restore the old folder, also on Ctrl-C between the renames
        if old.exists() and not place.exists():
            old.rename(place)
        with contextlib.suppress(OSError):  # removes it only if it is empty
            aside.rmdir()
        raise
    shutil.rmtree(aside)
