"""Which page of a pool belongs to whom. A page holds the keys and values of a few tokens; texts take pages as they
grow, share those of a beginning that they have in common, and leave them behind for the next text that begins so."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from draftgraph.errors import DraftGraphError
from draftgraph.kernels.attention import PAGE_SIZE

PAGE = PAGE_SIZE  # tokens


class OutOfPages(DraftGraphError):
    """The pool has no room for what a text needs now; it may have some later."""


class Pages:
    """Hands out pages. Neighbours are preferred: a text in one piece can be read in place.

    A page that nobody holds any more is kept for as long as there are others, if its tokens are known.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._holders: Counter[int] = Counter()
        self._free = np.ones(count, dtype=bool)
        self._pages: dict[bytes, int] = {}  # digest of a text up to the page's end -> page
        self._digests: dict[int, bytes] = {}
        self._left: OrderedDict[int, None] = (
            OrderedDict()
        )  # pages that nobody holds, but for their tokens; oldest first

    @property
    def available(self) -> int:
        """Pages that a text could be given."""
        return int(self._free.sum()) + len(self._left)

    @property
    def held(self) -> int:
        return self.count - self.available

    @property
    def empty(self) -> bool:
        """Nobody holds a page, and none is kept for its tokens."""
        return bool(self._free.all())

    def held_by(self, texts: Iterable[Sequence[int]]) -> int:
        """Pages that nobody but these texts holds: so many become available when they leave theirs."""
        held = Counter(page for pages in texts for page in pages)
        return sum(self._holders[page] == count for page, count in held.items())

    def take(self, count: int, after: int | None = None, expected: int = 0) -> list[int]:
        """New pages, in a row behind page `after` where those are free; else where a text of so many would fit."""
        if count > self.available:
            raise OutOfPages(f"{count} pages are needed, {self.available} of {self.count} are free")
        while count > int(self._free.sum()):
            self._forget(next(iter(self._left)))
        found = self._run_behind(after, count) if after is not None else None
        found = found or self._run_of(max(count, expected), count)
        if found is None:
            found = np.flatnonzero(self._free)[:count].tolist()
        self._free[found] = False
        self._holders.update(found)
        return found

    def grow(self, count: int) -> None:
        """The pool has become larger."""
        self._free = np.concatenate([self._free, np.ones(count - self.count, dtype=bool)])
        self.count = count

    def hold(self, pages: Sequence[int]) -> None:
        """One more text reads them."""
        for page in pages:
            self._left.pop(page, None)
        self._holders.update(pages)

    def leave(self, pages: Sequence[int]) -> None:
        """A text needs them no longer. Of those with known tokens the first are forgotten last."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if page in self._digests:
                self._left[page] = None
            else:
                self._free[page] = True

    def known(self, tenant: str, tokens: Sequence[int]) -> list[int]:
        """The pages of the longest known beginning of a text."""
        pages = []
        for digest in digests(tenant, tokens):
            if digest not in self._pages:
                break
            pages.append(self._pages[digest])
        return pages

    def note(self, tenant: str, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """These pages hold this text; nobody writes into them from now on."""
        for digest, page in zip(digests(tenant, tokens), pages, strict=False):
            if digest not in self._pages and page not in self._digests:
                self._pages[digest], self._digests[page] = page, digest

    def forget_texts(self) -> None:
        """What pages hold is no longer what a model would compute: nobody may begin with it."""
        self._free[list(self._left)] = True
        for known in (self._left, self._pages, self._digests):
            known.clear()

    def _forget(self, page: int) -> None:
        del self._left[page]
        del self._pages[self._digests.pop(page)]
        self._free[page] = True

    def _run_behind(self, page: int, count: int) -> list[int] | None:
        behind = range(page + 1, page + 1 + count)
        return list(behind) if behind.stop <= self.count and self._free[behind.start : behind.stop].all() else None

    def _run_of(self, wanted: int, count: int) -> list[int] | None:
        """The beginning of the smallest run of so many free pages; failing that, of the longest run."""
        edges = np.flatnonzero(np.diff(np.concatenate([[False], self._free, [False]])))
        starts, sizes = edges[::2], edges[1::2] - edges[::2]
        if not len(starts) or sizes.max() < count:
            return None
        enough = np.flatnonzero(sizes >= wanted)
        best = enough[sizes[enough].argmin()] if len(enough) else sizes.argmax()
        return list(range(int(starts[best]), int(starts[best]) + count))


def digests(tenant: str, tokens: Sequence[int]) -> list[bytes]:
    """One for every full page of a text, each of all tokens up to its end. Nobody can make two texts have one."""
    found = []
    before = hashlib.blake2b(tenant.encode(), digest_size=16).digest()
    numbers = np.asarray(tokens, dtype="<i8")
    for end in range(PAGE, len(numbers) + 1, PAGE):
        before = hashlib.blake2b(before + numbers[end - PAGE : end].tobytes(), digest_size=16).digest()
        found.append(before)
    return found


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)
