"""Pages of a pool: nobody gets another's, nothing is lost, and a beginning is found by its tenant alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgraph.engine.pages import PAGE, OutOfPages, Pages, digests, pages_for


def test_pages_come_in_a_row_where_they_can():
    pages = Pages(16)
    first = pages.take(2, expected=4)
    second = pages.take(3, expected=4)
    assert first == [0, 1] and second == [2, 3, 4]
    assert pages.take(1, after=second[-1]) == [5]
    assert pages.take(1, after=first[-1]) != [2]


def test_a_new_text_goes_where_it_has_room_to_grow():
    pages = Pages(20)
    held = pages.take(20)
    pages.leave(held[2:5])
    pages.leave(held[8:16])
    assert pages.take(2, expected=6) == [8, 9]
    assert pages.take(2, expected=3) == [2, 3]


def test_scattered_pages_are_better_than_none():
    pages = Pages(6)
    held = pages.take(6)
    pages.leave([held[0], held[2], held[4]])
    assert pages.take(3) == [0, 2, 4]
    with pytest.raises(OutOfPages, match="1 pages are needed, 0 of 6 are free"):
        pages.take(1)


def test_a_known_beginning_is_found_until_its_pages_are_needed():
    pages = Pages(4)
    text = list(range(3 * PAGE))
    held = pages.take(3)
    pages.note("anna", text, held)
    pages.leave(held)
    assert pages.available == 4
    assert pages.known("anna", text) == held
    assert pages.known("anna", text[: 2 * PAGE + 5]) == held[:2]
    assert pages.known("anna", [7, *text]) == []
    pages.take(2)  # one was free, and the end of the text is forgotten before its beginning
    assert pages.known("anna", text) == held[:2]


def test_what_somebody_reads_is_not_given_away():
    pages = Pages(3)
    held = pages.take(2)
    pages.note("", range(2 * PAGE), held)
    pages.hold(held)
    pages.leave(held)
    with pytest.raises(OutOfPages):
        pages.take(2)
    pages.leave(held)
    assert len(pages.take(3)) == 3
    assert pages.known("", range(2 * PAGE)) == []


def test_pages_that_others_hold_too_do_not_count_as_those_of_a_few():
    pages = Pages(6)
    shared, own, other = pages.take(2), pages.take(1), pages.take(3)
    pages.hold(shared)
    assert pages.held_by([[*shared, *own]]) == 1
    assert pages.held_by([[*shared, *own], [*shared, *other]]) == 6
    assert pages.held_by([]) == 0


def test_another_tenant_knows_nothing():
    pages = Pages(4)
    held = pages.take(2)
    pages.note("anna", range(2 * PAGE), held)
    assert pages.known("bob", range(2 * PAGE)) == []
    assert not set(digests("anna", range(2 * PAGE))) & set(digests("bob", range(2 * PAGE)))


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3), st.booleans()), max_size=40))
def test_every_page_has_one_owner_or_none(wishes):
    pages, texts, draw = Pages(24), [], np.random.default_rng(0)
    for count, kind, leaves in wishes:
        tokens = [kind] * (count * PAGE)
        known = pages.known("", tokens)
        if count - len(known) <= pages.available - sum(page in pages._left for page in known):
            pages.hold(known)
            mine = [*known, *(pages.take(count - len(known)) if count > len(known) else [])]
            assert not {page for page in mine[len(known) :] if any(page in other for other in texts)}
            pages.note("", tokens, mine)
            texts.append(mine)
        if leaves and texts:
            pages.leave(texts.pop(draw.integers(len(texts))))
        held = {page for text in texts for page in text}
        assert pages.held == len(held)
    for text in texts:
        pages.leave(text)
    assert pages.available == 24


def test_pages_for_tokens():
    assert [pages_for(tokens) for tokens in (0, 1, PAGE, PAGE + 1)] == [0, 1, 1, 2]
