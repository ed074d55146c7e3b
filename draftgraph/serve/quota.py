"""How much may be under way at a time, and how much of it for one key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from draftgraph.serve.errors import failure


class Quota:
    """What all tenants together may have of something. Who has less than an equal share of it is let in even if the
    others have taken all: one tenant keeps nobody out. So there may be a few times as much in all, never more."""

    def __init__(self, what: str, most: int, per_tenant: int | None = None) -> None:
        self._what, self._most = what, most
        self._per_tenant = most if per_tenant is None else min(per_tenant, most)
        self._taken: Counter[str] = Counter()

    @contextmanager
    def held(self, tenant: str, amount: int) -> Iterator[None]:
        """Takes so much for a while, if there is so much."""
        if amount > self._per_tenant:
            raise failure("usage", f"this asks for {amount} {self._what}, and {self._per_tenant} are taken at a time")
        own, tenants = self._taken[tenant] + amount, len(self._taken.keys() | {tenant})
        if own > self._per_tenant or (self._taken.total() + amount > self._most and own > self._most // tenants):
            raise failure("overloaded", f"too many {self._what} are under way already: try again later")
        self.add(tenant, amount)
        try:
            yield
        finally:
            self.add(tenant, -amount)

    def add(self, tenant: str, amount: int) -> None:
        """Without a question: for what takes the place of something that is held."""
        self._taken[tenant] += amount
        if not self._taken[tenant]:
            del self._taken[tenant]
