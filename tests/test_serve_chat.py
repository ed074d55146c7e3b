"""Chats through OpenAI's own client, against a live server with a scheduler that repeats what it was told."""

import pytest
from serve_tools import LiveServer

SAID = "the cat sat on the mat, 日本語 and 🐈‍⬛"


@pytest.fixture(scope="module")
def server():
    with LiveServer() as server:
        yield server


def ask(server, text=SAID, **options):
    options = {"temperature": 0} | options
    return server.client().chat.completions.create(
        model="fake", messages=[{"role": "user", "content": text}], **options
    )


def test_a_chat_is_answered(server):
    answer = ask(server)
    assert answer.choices[0].message.content == SAID
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-") and answer.model == "fake"


def test_a_stream_says_the_same(server):
    chunks = list(ask(server, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SAID
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert len(chunks) > 5
