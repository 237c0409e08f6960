"""The books of the page pool: no page is lost, shared by mistake or forgotten too early.

Proves that pages are counted by owner, that a known page without an owner can be found until it is
needed, in which order such pages are evicted, and that a key stands for everything up to its page.
`host` is the package's own modules; tests/mutants hands broken copies in.
"""

import random
from types import ModuleType

import pytest

from tests.oracles.engine_world import HOST


@pytest.fixture
def host() -> ModuleType:
    return HOST


def test_pages_are_taken_once_and_come_back(host: ModuleType) -> None:
    pool = host.pages.PagePool(5)
    first, second = pool.take(3), pool.take(2)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert (pool.num_held, pool.num_available) == (5, 0)
    pool.release(first)
    assert (pool.num_held, pool.num_available) == (2, 3)
    pool.check([second])


def test_too_many_pages_take_nothing(host: ModuleType) -> None:
    pool = host.pages.PagePool(3)
    held = pool.take(2)
    with pytest.raises(host.pages.OutOfPages, match="2 pages wanted, 1 available"):
        pool.take(2)
    pool.check([held])
    assert len(pool.take(1)) == 1


def test_a_shared_page_is_held_until_its_last_owner_goes(host: ModuleType) -> None:
    pool = host.pages.PagePool(2)
    (page,) = pool.take(1)
    pool.share(page)
    assert pool.owners(page) == 2
    pool.release([page])
    pool.check([[page]])
    assert pool.take(1) != [page]
    pool.release([page])
    assert pool.take(1) == [page]


def test_a_known_page_is_found_when_nobody_holds_it(host: ModuleType) -> None:
    pool = host.pages.PagePool(3)
    pages = pool.take(2)
    for key, page in zip("ab", pages, strict=True):
        pool.publish(key, page, payload=key * 2)
    pool.release(pages)
    assert pool.num_available == 3
    assert pool.find("abc") == pages
    assert pool.find("xab") == []
    assert pool.find("axb") == pages[:1]
    assert (pool.queries, pool.hits) == (6, 3)
    assert pool.payload(pages[1]) == "bb"
    pool.share(pages[0])
    pool.check([pages[:1]])
    assert pool.num_available == 2


def test_unknown_pages_go_before_known_ones_and_those_in_order_of_release(
    host: ModuleType,
) -> None:
    pool = host.pages.PagePool(6)
    old, new, other = pool.take(2), pool.take(2), pool.take(2)
    for name, pages in (("o", old), ("n", new)):
        for i, page in enumerate(pages):
            pool.publish((name, i), page)
    pool.release(old)
    pool.release(new)
    pool.release(other)
    assert set(pool.take(2)) == set(other)
    # Of one text the last page goes first: a beginning can be used without its end.
    assert pool.take(4) == [old[1], old[0], new[1], new[0]]
    assert pool.evictions == 4


def test_a_page_used_again_is_not_the_next_to_go(host: ModuleType) -> None:
    pool = host.pages.PagePool(2)
    first, second = pool.take(2)
    pool.publish("f", first)
    pool.publish("s", second)
    pool.release([first])
    pool.release([second])
    pool.share(first)
    pool.release([first])
    assert pool.take(1) == [second]
    assert pool.find("f") == [first]


def test_an_evicted_page_is_forgotten(host: ModuleType) -> None:
    pool = host.pages.PagePool(1)
    (page,) = pool.take(1)
    pool.publish("key", page, payload="row")
    pool.release([page])
    assert pool.take(1) == [page]
    assert pool.find(["key"]) == []
    assert pool.payload(page) is None
    pool.publish("other", page)
    pool.check([[page]])
    assert pool.find(["other"]) == [page]


def test_the_first_page_under_a_key_stays_and_a_page_keeps_its_key(host: ModuleType) -> None:
    pool = host.pages.PagePool(3)
    pages = pool.take(3)
    pool.publish("key", pages[0])
    pool.publish("key", pages[1])
    pool.publish("late", pages[0])
    assert pool.find(["key"]) == [pages[0]]
    assert pool.find(["late"]) == []
    pool.check([pages])


def test_reset_forgets_everything(host: ModuleType) -> None:
    pool = host.pages.PagePool(4)
    pages = pool.take(4)
    pool.publish("key", pages[0], payload=1)
    pool.reset()
    pool.check([])
    assert pool.find(["key"]) == []
    assert pool.payload(pages[0]) is None
    assert len(pool.take(4)) == 4


def test_random_use_keeps_the_books_right(host: ModuleType) -> None:
    rng = random.Random(0)
    pool, held = host.pages.PagePool(9), []
    for number in range(2000):
        action = rng.random()
        if action < 0.4 and pool.num_available:
            held.append(pool.take(rng.randint(1, pool.num_available)))
        elif action < 0.7 and held:
            pool.release(held.pop(rng.randrange(len(held))))
        elif action < 0.9 and held:
            pages = rng.choice(held)
            pool.publish(number % 12, rng.choice(pages))
        else:
            found = pool.find([rng.randrange(12)])
            for page in found:
                pool.share(page)
            held += [found] if found else []
        pool.check(held)
    assert pool.evictions > 20
    assert pool.hits > 20


@pytest.mark.parametrize("wrong", ["owner", "twice", "lost", "key"])
def test_check_notices_wrong_books(wrong: str) -> None:
    pool = HOST.pages.PagePool(3)
    pages = pool.take(2)
    pool.publish("key", pages[0])
    if wrong == "owner":
        pool._owners[pages[0]] = 2
    elif wrong == "twice":
        pool._free.append(pages[1])
    elif wrong == "lost":
        pool._free.clear()
    else:
        pool._key_of[pages[1]] = "key"
    with pytest.raises(RuntimeError):
        pool.check([pages])


def keys(host: ModuleType, tokens: list[int], salt: bytes = b"s", unit: int = 4) -> list:
    chain = host.pages.Chain(salt, unit, page_size=4)
    chain.extend(tokens)
    return chain.keys


def test_a_key_stands_for_all_tokens_up_to_its_page(host: ModuleType) -> None:
    text = list(range(12))
    base = keys(host, text)
    assert len(base) == len(set(base)) == 3
    for i in range(12):
        changed = [*text[:i], 99, *text[i + 1 :]]
        same = [a == b for a, b in zip(base, keys(host, changed), strict=True)]
        assert same == [page < i // 4 for page in range(3)]


def test_equal_pages_at_different_places_have_different_keys(host: ModuleType) -> None:
    assert len(set(keys(host, [5] * 12))) == 3


def test_keys_depend_on_the_salt(host: ModuleType) -> None:
    assert not set(keys(host, [1] * 8, salt=b"one")) & set(keys(host, [1] * 8, salt=b"two"))


def test_a_part_of_a_unit_has_no_key(host: ModuleType) -> None:
    chain = host.pages.Chain(b"", 4, page_size=4)
    chain.extend([1, 2, 3])
    assert (chain.keys, chain.length) == ([], 0)
    chain.extend([1, 2, 3, 4, 5])
    assert (len(chain.keys), chain.length) == (1, 4)


def test_a_chain_grows_piece_by_piece(host: ModuleType) -> None:
    text = [7 * i % 11 for i in range(40)]
    chain = host.pages.Chain(b"s", 4, page_size=4)
    for end in (3, 4, 9, 9, 23, 40):
        chain.extend(text[chain.length : end])
        assert chain.length == end // 4 * 4
        assert chain.keys == keys(host, text[:end])


def test_the_pages_of_a_unit_have_keys_of_their_own(host: ModuleType) -> None:
    """Pages of 4 and blocks of 6: 12 tokens are keyed together, as three pages."""
    text = list(range(30))
    base = keys(host, text, unit=12)
    assert len(base) == len(set(base)) == 6
    changed = keys(host, [*text[:11], 99, *text[12:]], unit=12)
    assert not set(base) & set(changed)  # a page's values may depend on the whole block
