"""The body of `/v1/completions`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from draftgraph.serve.schemas.chat import ResponseFormat
from draftgraph.serve.schemas.common import Alternatives, Count, GenerationRequest

Text = Annotated[str, Field(examples=["Once upon a time"])]


class CompletionRequest(GenerationRequest):
    prompt: Text | list[Count] | list[str] | list[list[Count]] = Field(
        description="A text or its token ids, or a list of such"
    )
    logprobs: Alternatives | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    response_format: ResponseFormat | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """As a list, whatever was given."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [prompt]
        return prompt  # type: ignore[return-value]
