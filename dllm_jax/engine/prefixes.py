"""The prefix cache: which pages of a sequence others may share, and which it finds."""

from typing import Any

from dllm_jax.engine.layout import EngineLayout
from dllm_jax.engine.pages import Chain, PagePool, digest
from dllm_jax.engine.sequence import Sequence


class Prefixes:
    """Finds and publishes pages of a pool by what they hold."""

    def __init__(self, layout: EngineLayout, pool: PagePool):
        self._layout, self._pool = layout, pool
        self._unit_pages = layout.unit // layout.page_size

    def _salt(self, sequence: Sequence) -> bytes:
        """The salt of its keys; without prefix caching it differs for each request."""
        if self._layout.prefix_caching:
            return self._layout.salt
        leader = sequence.leader or sequence
        return b"%s|%d" % (self._layout.salt, leader.rank[1])

    def _chain(self, sequence: Sequence) -> Chain:
        if sequence.chain is None:
            sequence.chain = Chain(self._salt(sequence), self._layout.unit, self._layout.page_size)
        return sequence.chain

    def _prompt_keys(self, sequence: Sequence) -> list[Any]:
        """Keys of a prompt that is reusable only as a whole; its last page may be partly filled."""
        count = self._layout.pages_for(sequence.prefix_len)
        whole = digest(b"whole|" + self._salt(sequence), sequence.prompt)
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
        chain = self._chain(sequence)
        if chain.length + layout.unit <= reusable:
            chain.extend(sequence.text_ids(chain.length, reusable))
        hits = self._pool.find(chain.keys[: max(reusable, 0) // layout.unit * self._unit_pages])
        # Eviction takes single pages: the rest of a unit may end within a block.
        return hits[: len(hits) // self._unit_pages * self._unit_pages]

    def publish(self, sequence: Sequence) -> None:
        """Publish full, final pages to the prefix cache.

        The first fetch of a tenancy publishes the prompt, for sequences that wait for it; the text
        after it is published when the sequence leaves its slot.
        """
        if not sequence.publishes:
            return
        if self._layout.is_full:
            self._publish_prompt(sequence)
        else:
            # A text may have committed more than it emitted: a stop id, cells past a limit.
            end = min(sequence.start, len(sequence.prompt) + len(sequence.tokens))
            if self._layout.soft_commits or self._layout.in_window:
                end = min(end, sequence.prefix_len)
            self._publish_up_to(sequence, end)
        sequence.prompt_published = True

    def _publish_prompt(self, sequence: Sequence) -> None:
        if sequence.num_published:
            return
        keys = self._prompt_keys(sequence)
        for i, key in enumerate(keys, 1):
            self._pool.publish(
                key, sequence.pages[i - 1], sequence.boundary if i == len(keys) else None
            )
        sequence.num_published = len(keys)

    def _publish_up_to(self, sequence: Sequence, end: int) -> None:
        chain = self._chain(sequence)
        if chain.length + self._layout.unit <= end:
            chain.extend(sequence.text_ids(chain.length, end))
        count = end // self._layout.unit * self._unit_pages
        for i in range(sequence.num_published, count):
            self._pool.publish(chain.keys[i], sequence.pages[i])
        sequence.num_published = count
