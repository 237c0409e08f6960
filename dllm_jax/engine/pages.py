"""Pages of the KV cache as numbers: ownership, sharing, eviction.

A page is free, held by a number of owners, or idle: without an owner, but its content is published
under a key and can be shared until the page is evicted. `Prefixes` are those keys: which pages of a
sequence others may share, and which it finds.
"""

from array import array
from collections import OrderedDict, abc
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

from dllm_jax.engine.layout import EngineLayout
from dllm_jax.engine.sequence import Sequence

_DIGEST_BYTES = 16  # 128 bits: equal keys mean equal tokens


class OutOfPages(RuntimeError):
    """A request for more pages than are free or idle."""


class PagePool:
    """The pages of one pool.

    Attributes:
        num_pages: Pages of the pool.
        queries, hits: Pages looked up by key, and found.
        evictions: Idle pages taken for other content.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.queries = self.hits = self.evictions = 0
        self.reset()

    def reset(self) -> int:
        """Free every page and forget every key: the contents are gone; the pages that had a key."""
        count = len(getattr(self, "_key_of", ()))
        self._free = list(range(self.num_pages - 1, -1, -1))  # taken from the end
        self._owners = [0] * self.num_pages
        self._page_of: dict[Any, int] = {}
        self._key_of: dict[int, Any] = {}
        self._payload: dict[int, Any] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently released first
        return count

    @property
    def num_available(self) -> int:
        """Pages that `take` can return."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        """Pages with at least one owner."""
        return self.num_pages - self.num_available

    def take(self, count: int) -> list[int]:
        """Give `count` pages to one owner: free ones, then idle ones in order of release.

        Raises:
            OutOfPages: Too few are available; no page was taken.
        """
        if count > self.num_available:
            raise OutOfPages(
                f"{count} pages wanted, {self.num_available} available; release some, or preempt"
            )
        taken = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                self._forget(page)
                self.evictions += 1
            self._owners[page] = 1
            taken.append(page)
        return taken

    def share(self, page: int) -> None:
        """Add an owner to a page that is held or idle."""
        if self._owners[page] == 0:
            del self._idle[page]
        self._owners[page] += 1

    def release(self, pages: abc.Sequence[int]) -> None:
        """Remove one owner of each page, given in order of position.

        The last pages become idle first and are evicted first: a prefix outlives its continuation.
        """
        for page in reversed(pages):
            self._owners[page] -= 1
            if self._owners[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def publish(self, key: Any, page: int, payload: Any = None) -> None:
        """Make a held page known under `key`, unless either is taken already."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key
            if payload is not None:
                self._payload[page] = payload

    def find(self, keys: Iterable[Any]) -> list[int]:
        """Pages of the leading keys that are known."""
        found = []
        for key in keys:
            self.queries += 1
            page = self._page_of.get(key)
            if page is None:
                break
            self.hits += 1
            found.append(page)
        return found

    def payload(self, page: int) -> Any:
        """The payload published with the page."""
        return self._payload.get(page)

    def owners(self, page: int) -> int:
        """Number of owners."""
        return self._owners[page]

    def _forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]
        self._payload.pop(page, None)

    def check(self, held: Iterable[abc.Sequence[int]]) -> None:
        """Raise RuntimeError if ownership is inconsistent; `held` has the pages of every owner."""
        counted = [0] * self.num_pages
        for pages in held:
            for page in pages:
                counted[page] += 1
        if counted != self._owners:
            raise RuntimeError(f"owners {self._owners} but {counted} are held")
        idle, free = set(self._idle), set(self._free)
        held_pages = {page for page, owners in enumerate(counted) if owners}
        if len(free) != len(self._free) or idle & free or (idle | free) & held_pages:
            raise RuntimeError("a page is in two places")
        if len(idle) + len(free) + len(held_pages) != self.num_pages:
            raise RuntimeError("a page is in no place")
        if not idle <= set(self._key_of) or free & set(self._key_of):
            raise RuntimeError("an idle page without a key, or a free one with one")
        if {key: page for page, key in self._key_of.items()} != self._page_of:
            raise RuntimeError("keys and pages do not match")


class Chain:
    """Keys of a growing text's pages: each key stands for all tokens up to its page's end.

    Args:
        salt: What cached keys and values depend on besides the tokens.
        unit: Tokens keyed together, a multiple of `page_size`.
    """

    def __init__(self, salt: bytes, unit: int, page_size: int):
        # The salt's length goes first, so that salt and tokens cannot be confused.
        self._hash = blake2b(b"%d|%b" % (len(salt), salt), digest_size=_DIGEST_BYTES)
        self._unit, self._parts = unit, unit // page_size
        self.keys: list[Any] = []
        self.length = 0  # tokens that have a key

    def extend(self, tokens: abc.Sequence[int]) -> None:
        """Add the keys of the tokens after the first `length`, in whole units."""
        words = array("I", tokens)
        data, width, running = words.tobytes(), self._unit * words.itemsize, self._hash
        keys = []
        for end in range(width, len(data) + 1, width):
            running.update(data[end - width : end])
            keys.append(running.digest())
        self.length += len(keys) * self._unit
        if self._parts > 1:
            keys = [(key, part) for key in keys for part in range(self._parts)]
        self.keys += keys


class Prefixes:
    """Finds and publishes pages of a pool by what they hold."""

    def __init__(self, layout: EngineLayout, pool: PagePool):
        self._layout, self._pool = layout, pool
        self._unit_pages = layout.unit // layout.page_size

    def _salt(self, sequence: Sequence) -> bytes:
        """The salt of its keys; without prefix caching it differs for each request."""
        if self._layout.prefix_caching:
            own = sequence.owner.request.cache_salt.encode()
            return b"%b|%b" % (self._layout.salt, own) if own else self._layout.salt
        leader = sequence.leader or sequence
        return b"%s|%d" % (self._layout.salt, leader.rank[1])

    def _keys(self, sequence: Sequence, end: int) -> list[Any]:
        """Keys of its pages before position `end`, as far as these are whole units of its text.

        A text may have committed more than it emitted: a stop id, cells past a limit.
        """
        layout, chain = self._layout, sequence.chain
        if chain is None:
            chain = sequence.chain = Chain(self._salt(sequence), layout.unit, layout.page_size)
        if chain.length + layout.unit <= end:
            chain.extend(sequence.text_ids(chain.length, end))
        return chain.keys[: max(end, 0) // layout.unit * self._unit_pages]

    def _prompt_keys(self, sequence: Sequence) -> list[Any]:
        """Keys of a prompt that is reusable only as a whole; its last page may be partly filled."""
        count = self._layout.pages_for(sequence.prefix_len)
        data = b"whole|" + self._salt(sequence) + array("I", sequence.prompt).tobytes()
        whole = blake2b(data, digest_size=_DIGEST_BYTES).digest()
        return [(whole, page) for page in range(count)]

    def hits(self, sequence: Sequence) -> list[int]:
        """Pages of the sequence's prefix that are in the pool."""
        layout, start = self._layout, sequence.start
        if start == 0 or not (layout.prefix_caching or sequence.leader or sequence.saved):
            return []
        if layout.is_full:
            keys = self._prompt_keys(sequence)
            hits = self._pool.find(keys)
            return hits if len(hits) == len(keys) else []
        # A saved slot holds its boundary row: then all of the prefix may be a hit.
        reusable = start if sequence.saved else start - layout.compute_at_least
        hits = self._pool.find(self._keys(sequence, reusable))
        # Eviction takes single pages: the rest of a unit may end within a block.
        return hits[: len(hits) // self._unit_pages * self._unit_pages]

    def publish(self, sequence: Sequence) -> None:
        """Publish full, final pages to the prefix cache.

        The first fetch of a tenancy publishes the prompt, for sequences that wait for it; the text
        after it is published when the sequence leaves its slot.
        """
        if not sequence.publishes:
            return
        layout = self._layout
        if layout.is_full:
            keys = self._prompt_keys(sequence)
        else:
            is_prompt = layout.soft_commits or layout.in_window
            keys = self._keys(sequence, sequence.prefix_len if is_prompt else sequence.start)
        for i in range(sequence.num_published, len(keys)):
            is_last = i + 1 == len(keys)
            self._pool.publish(keys[i], sequence.pages[i], sequence.boundary if is_last else None)
        sequence.num_published = len(keys)
        sequence.prompt_published = True
