"""Serve's hook for which replica gets a request.

Serve copies all that this module defines to those who ask, so that it must not be compared by its class.
"""

from __future__ import annotations

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from draftgraph.serve.conversations import Asked, preferred


class ConversationRouter(RequestRouter):
    """The replica that `preferred` names; without a conversation, or if that one takes no more, the less busy of two
    that are drawn."""

    def initialize_state(self, slack: int) -> None:  # type: ignore[override]
        self._slack = slack

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        asked: Asked = pending_request.args[0]
        pending_request.routing_context.should_backoff = True
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas}
        names = [name for name in by_name if name not in asked.avoid] or list(by_name)
        drawn = [[by_name[name] for name in random.sample(names, min(2, len(names)))]]
        if asked.conversation is None:
            return drawn
        loads = {name: self.replica_queue_len_cache.get(by_name[name].replica_id) or 0 for name in names}
        return [[by_name[preferred(asked.conversation, loads, self._slack)]], *drawn]
