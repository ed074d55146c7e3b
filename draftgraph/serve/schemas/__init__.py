"""Requests and answers in OpenAI's form."""

from draftgraph.serve.schemas.answers import ChatAnswer, Completion, Model, ModelList
from draftgraph.serve.schemas.chat import ChatRequest, Message
from draftgraph.serve.schemas.common import Extension, GenerationRequest
from draftgraph.serve.schemas.completions import CompletionRequest

__all__ = [
    "ChatAnswer",
    "ChatRequest",
    "Completion",
    "CompletionRequest",
    "Extension",
    "GenerationRequest",
    "Message",
    "Model",
    "ModelList",
]
