"""Keys with a name and limits of their own, and what each has used.

A limit a minute is a bucket that fills evenly. A request is taken while the bucket holds something;
what it used is known when it ends, so it may take more than is left, and later ones wait.
"""

import re
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from dllm_jax.serve.refusals import Refusal

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
_MINUTE = 60.0
_SOON_S = 2  # for a text of the key to end


class Key(NamedTuple):
    """A key; a limit of None is none.

    Attributes:
        name: What log and metrics call it.
        texts: Texts that it may have in the engine.
        waiting: Texts beyond the slots that other clients leave.
        tokens_per_minute: Of prompts and answers.
        compile_s_per_minute: Seconds of compiling its constraints.
    """

    name: str
    key: str
    texts: int | None = None
    waiting: int | None = None
    tokens_per_minute: int | None = None
    compile_s_per_minute: int | None = None


LIMITS = Key._fields[2:]


def read_keys(text: str) -> tuple[Key, ...]:
    """The keys of a file: `NAME KEY [LIMIT=N]...` a line; empty lines and those of # are none.

    Raises:
        ValueError: A line is no such one, or a name or key comes twice. Its message names no key.
    """
    found: dict[str, Key] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) < 2 or _NAME.fullmatch(words[0]) is None:
            raise ValueError(
                f"line {number} has no name and key; write NAME KEY, with a name of letters, "
                "digits and . _ -"
            )
        given: dict[str, int] = {}
        for word in words[2:]:
            name, _, value = word.partition("=")
            if name not in LIMITS or name in given or not value.isdecimal():
                raise ValueError(
                    f"line {number}: word {words.index(word) + 1} is no limit, or a second one; "
                    f"write {', '.join(f'{one}=N' for one in LIMITS)}"
                )
            given[name] = int(value)
        if words[0] in found or words[1] in [one.key for one in found.values()]:
            raise ValueError(f"line {number}: its name or its key was there before; give another")
        found[words[0]] = Key(words[0], words[1], **given)
    if not found:
        raise ValueError("it has no key; give at least one")
    return tuple(found.values())


class Quotas:
    """What keys have used.

    Args:
        count: Called with the key's name and the limit of each refusal.
        now: A clock.
    """

    def __init__(
        self,
        keys: Iterable[Key],
        count: Callable[[str, str], None],
        now: Callable[[], float] = time.monotonic,
    ):
        self._keys = {f"key {one.name}": one for one in keys}  # as `auth.Guard` names clients
        self._count, self._now = count, now
        self._left: dict[tuple[str, str], tuple[float, float]] = {}  # and when it was so much

    def name(self, client: str) -> str | None:
        """The name of a client's key."""
        key = self._keys.get(client)
        return None if key is None else key.name

    def check(self, client: str, num_texts: int, num_mine: int, num_free: int) -> None:
        """Refuse a request over a limit of its key.

        Args:
            num_mine: Texts of the key in the engine.
            num_free: Slots that other clients leave.

        Raises:
            Refusal: 429, with how long to wait; 400 for more texts than the key may ever have.
        """
        key = self._keys.get(client)
        if key is None:
            return
        if key.texts is not None and num_texts > key.texts:
            raise Refusal(
                f"prompts times n are {num_texts}; the key {key.name} takes texts={key.texts} at "
                "once: send several requests",
                param="n",
            )
        texts = num_mine + num_texts
        for limit, held in (("texts", texts), ("waiting", texts - num_free)):
            most = getattr(key, limit)
            if most is not None and held > max(most, 0):
                self._refuse(key, limit, f"{held} texts", most, _SOON_S)
        for limit in ("tokens_per_minute", "compile_s_per_minute"):
            most = getattr(key, limit)
            if most is not None and (left := self._of(client, limit, most)) <= 0:
                wait_s = _MINUTE * (1 - left) / max(most, 1)
                self._refuse(key, limit, "all of a minute", most, wait_s)

    def spend(self, client: str, limit: str, amount: float) -> None:
        """A client has used so much of a limit a minute."""
        key = self._keys.get(client)
        most = None if key is None else getattr(key, limit)
        if most is not None:
            self._left[client, limit] = self._of(client, limit, most) - amount, self._now()

    def _of(self, client: str, limit: str, most: float) -> float:
        left, since_s = self._left.get((client, limit), (most, 0.0))
        return min(most, left + (self._now() - since_s) * most / _MINUTE)

    def _refuse(self, key: Key, limit: str, held: str, most: int, wait_s: float) -> None:
        self._count(key.name, limit)
        raise Refusal(
            f"the key {key.name} would hold or has used {held}, and takes {limit}={most}; try "
            "again later",
            code="key_limit",
            status=429,
            headers={"retry-after": str(max(1, round(wait_s)))},
        )
