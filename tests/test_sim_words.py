"""What the sim says and counts: known text, and numbers that make it again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.sim.asks import Rejected, read_ask
from appliance.sim.words import LONGEST_ECHO, answer_text, count_tokens, embed, stretch, token_bytes, token_ids


def test_an_answer_repeats_what_the_user_said() -> None:
    assert answer_text("hello  big\nworld") == "You said: hello big world"
    assert answer_text("  ") == "You said: nothing."
    assert answer_text("hello big world", 3) == "You said: hello"
    assert answer_text("hello big", 7) == "You said: hello big hello big hello"
    assert len(answer_text("word " * 1000).split()) == LONGEST_ECHO + 2


@given(st.text(), st.integers(1, 200))
def test_a_word_is_a_token(said: str, tokens: int) -> None:
    words = stretch(["You", " said:", *(f" {word}" for word in said.split() or ["x"])], tokens)
    assert len(words) == tokens
    assert len(answer_text(said, tokens).split()) == tokens


@given(st.binary())
def test_token_numbers_make_the_text_again(text: bytes) -> None:
    ids = token_ids(text)
    assert token_bytes(ids) == text
    assert max(1, len(ids)) == count_tokens(text)


@pytest.mark.parametrize("number", [0, 1, -1, 255, 2**40, 2**33])
def test_a_number_that_is_no_token_is_refused(number: int) -> None:
    with pytest.raises((OverflowError, ValueError)):
        token_bytes([number])


@given(st.binary(), st.integers(1, 200))
def test_vectors_have_length_one_and_depend_on_the_text(text: bytes, dimensions: int) -> None:
    vector = embed(text, dimensions)
    assert len(vector) == dimensions
    assert sum(value * value for value in vector) == pytest.approx(1.0)
    assert embed(text, dimensions) == vector
    if dimensions > 4:
        assert embed(text + b"!", dimensions) != vector


@pytest.mark.parametrize(
    ("route", "body", "said", "text"),
    [
        (
            "chat",
            b'{"messages":[{"role":"system","content":"be"},{"role":"user","content":"a b"}]}',
            "a b",
            b"system: be\nuser: a b",
        ),
        (
            "chat",
            b'{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]}',
            "a b",
            b"user: a b",
        ),
        ("chat", b'{"tools":[{"x": 1}],"messages":[{"role":"user","content":null}]}', "", b'[{"x": 1}]\nuser: '),
        ("completions", b'{"prompt":"a b"}', "a b", b"a b"),
        ("responses", b'{"input":"a b","instructions":"be"}', "a b", b"system: be\nuser: a b"),
        (
            "messages",
            b'{"max_tokens":9,"system":"be","messages":[{"role":"user","content":"a"}]}',
            "a",
            b"system: be\nuser: a",
        ),
    ],
)
def test_each_route_has_its_prompt(route: str, body: bytes, said: str, text: bytes) -> None:
    (prompt,) = read_ask(route, body).prompts
    assert (prompt.said, prompt.text) == (said, text)


def test_a_completion_takes_texts_and_tokens() -> None:
    ids = token_ids(b"hello world")
    assert [prompt.said for prompt in read_ask("completions", b'{"prompt":["a","b"]}').prompts] == ["a", "b"]
    for form in (f"{ids}", f"[{ids}]"):
        assert read_ask("completions", f'{{"prompt":{form}}}'.encode()).prompts[0].said == "hello world"


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("chat", b""),
        ("chat", b"not json"),
        ("chat", b"[]"),
        ("chat", b'{"messages":[]}'),
        ("chat", b'{"messages":"hello"}'),
        ("chat", b'{"messages":[{"role":7,"content":""}]}'),
        ("chat", b'{"messages":[{"role":"user","content":7}]}'),
        ("chat", b'{"messages":[{"role":"user","content":"\xff"}]}'),
        ("chat", b'{"model":7,"messages":[{"role":"user","content":""}]}'),
        ("completions", b'{"prompt":"a","n":0}'),
        ("completions", b'{"prompt":"a","max_tokens":0}'),
        ("completions", b'{"prompt":"a","max_tokens":1e99}'),
        ("completions", b'{"prompt":["a",1]}'),
        ("completions", b'{"prompt":[]}'),
        ("completions", b'{"prompt":[7]}'),
        ("completions", b'{"prompt":"a","stream_options":{"include_usage":true}}'),
        ("completions", b'{"prompt":"a","sim":{"tsatus":500}}'),
        ("completions", b'{"prompt":"a","sim":{"status":200}}'),
        ("completions", b'{"prompt":"a","sim":{"cut_after":-2}}'),
        ("completions", b'{"prompt":"a","sim":{"garbage":"bin"}}'),
        ("messages", b'{"messages":[{"role":"user","content":""}]}'),
        ("completions", b'{"prompt":' + b"[" * 100_000 + b"}"),
    ],
)
def test_a_body_that_makes_no_sense_is_refused(route: str, body: bytes) -> None:
    with pytest.raises(Rejected) as refusal:
        read_ask(route, body)
    assert refusal.value.status == 400


def test_faults_come_from_the_body_or_the_header() -> None:
    assert read_ask("completions", b'{"prompt":"a"}', b'{"cut_after":3}').faults.cut_after == 3
    assert read_ask("completions", b'{"prompt":"a","sim":{"cut_after":5}}', b'{"cut_after":3}').faults.cut_after == 5
    with pytest.raises(Rejected):
        read_ask("completions", b'{"prompt":"a"}', b"cut_after=3")
