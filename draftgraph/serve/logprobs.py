"""Log-probabilities in OpenAI's two forms: of chats and of completions."""

from __future__ import annotations

from collections.abc import Sequence

from draftgraph.serve.answer import Scored
from draftgraph.serve.schemas.answers import Alternative, ChatLogprobs, CompletionLogprobs, TokenLogprob
from draftgraph.serve.tokens import TokenNames


def of_chat(scored: Sequence[Scored], names: TokenNames) -> ChatLogprobs:
    return {"content": [_content(one, names) for one in scored], "refusal": None}


def _content(one: Scored, names: TokenNames) -> TokenLogprob:
    top = [_alternative(token, logprob, names) for token, logprob in one.top]
    own = _alternative(one.token, one.logprob or 0.0, names)
    return {"token": own["token"], "logprob": own["logprob"], "bytes": own["bytes"], "top_logprobs": top}


def _alternative(token: int, logprob: float, names: TokenNames) -> Alternative:
    return {"token": names.text(token), "logprob": logprob, "bytes": list(names.bytes(token))}


def of_completion(scored: Sequence[Scored], names: TokenNames, offset: int = 0) -> CompletionLogprobs:
    """`offset`: where the text that these tokens are counted in begins in the choice's."""
    return {
        "tokens": [names.key(one.token) for one in scored],
        "token_logprobs": [one.logprob for one in scored],
        "top_logprobs": [_best(one, names) for one in scored],
        "text_offset": [one.start + offset for one in scored],
    }


def _best(one: Scored, names: TokenNames) -> dict[str, float] | None:
    """The chosen token is always among them."""
    if one.logprob is None:
        return None
    best = {names.key(token): logprob for token, logprob in one.top}
    return best | {names.key(one.token): one.logprob}
