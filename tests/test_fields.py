"""Single fields in bodies: found where a JSON reader finds them, replaced without touching another byte."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from appliance.wire import fields, multipart
from appliance.wire.fields import LONG_BYTES, MOST_TOKENS, Unclear, locate, may_repeat, renamed, repeated

LONG = "x" * LONG_BYTES

keys = st.sampled_from(["model", "stream", "messages", "prompt", "input", "a", 'q"', "mod", "", "é", "model "])
texts = st.sampled_from(["", "a", '"', "\\", '\\"', '"model"', '{"model":', "}", "]", "é😀", "\x00", '"},"model":"x"'])
long_texts = st.sampled_from([LONG, f'":1,{" " * LONG_BYTES}', f'"model":"{LONG}', f'{LONG}"model"', f"[{LONG}]"])
values = st.recursive(
    st.one_of(texts, long_texts, st.integers(), st.booleans(), st.none(), st.just(1e300)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)),
    max_leaves=6,
)


@st.composite
def objects(draw: st.DrawFn) -> bytes:
    """JSON of an object as some client may write it: repeated keys, escapes, blanks, raw or escaped text."""
    blank = st.sampled_from([b"", b"", b" ", b"\n\t"])

    def escaped(key: str) -> bytes:
        text = json.dumps(key)
        if key and draw(st.booleans()) and draw(st.booleans()):
            at = draw(st.integers(1, len(key)))
            if key[at - 1].isalpha():
                plain = json.dumps(key, ensure_ascii=False)[1:-1]
                text = (
                    '"' + plain[: at - 1] + f"\\u{ord(key[at - 1]):04x}" + plain[at:] + '"' if key.isalpha() else text
                )
        return text.encode()

    pairs = []
    for _ in range(draw(st.integers(0, 5))):
        key = escaped(draw(keys))
        value = json.dumps(draw(values), ensure_ascii=draw(st.booleans())).encode()
        pairs.append(draw(blank) + key + draw(blank) + b":" + draw(blank) + value + draw(blank))
    return draw(blank) + b"{" + (b",".join(pairs) or draw(blank)) + b"}" + draw(blank)


def pairs_of(body: bytes) -> list[tuple[str, Any]]:
    """The outermost pairs as Python's own reader sees them."""
    layers: list[list[tuple[str, Any]]] = []

    def keep(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        layers.append(pairs)
        return dict(pairs)

    json.loads(body, object_pairs_hook=keep)
    return layers[-1]


@given(objects())
@example(b'{"model":"a","x":1,' + b" " * LONG_BYTES + b'"model":"b","prompt":":1,' + b" " * LONG_BYTES + b'"}')
@example(b'{"mod\\u0065l":"a","model":"b"}')
@example(b'{"\\u006dodel":"a"}')
@settings(max_examples=400, deadline=None)
def test_a_name_that_is_there_twice_is_found(body: bytes) -> None:
    names = [key for key, _ in pairs_of(body)]
    for name in ("model", "stream"):
        twice = names.count(name) > 1
        assert (repeated(body, name) == name) is twice
        if twice:
            assert may_repeat(body, f'"{name}"'.encode())


@given(objects())
@example(b'{"a":{"model":"x"},"model":"y"}')
@example(b'{"prompt":"%b","model":"y","x":["model"]}' % (LONG.encode() + b'\\"model\\"'))
@settings(max_examples=400, deadline=None)
def test_only_the_bytes_of_the_name_change(body: bytes) -> None:
    pairs = pairs_of(body)
    named = [value for key, value in pairs if key == "model"]
    if len(named) != 1:
        return
    if not isinstance(named[0], str):
        with pytest.raises(KeyError):
            locate(body, "model")
        return
    start, end = locate(body, "model")
    assert json.loads(body[start:end]) == named[0]
    changed = renamed(body, b"application/json", 'n"é')
    assert changed[:start] == body[:start] and changed[len(changed) - len(body) + end :] == body[end:]
    assert pairs_of(changed) == [(key, 'n"é' if key == "model" else value) for key, value in pairs]


def test_a_name_that_is_not_there() -> None:
    for body in (b"{}", b'{"x":"model"}', b'{"x":"model","y":["model"]}', b'{"x":{"model":1,"model":2}}'):
        with pytest.raises(KeyError):
            locate(body, "model")


MANY = 2 * MOST_TOKENS
HEAVY = {
    "brackets": (b'{"x":[' + b"[]," * MANY + b'1],"model":"a","model":"b"}', "unclear"),
    "keys": (b"{" + b'"k":1,' * MANY + b'"model":"a","model":"b"}', "unclear"),
    "strings": (b'{"x":[' + b'"",' * MANY + b'1],"model":"a","model":"b"}', "unclear"),
    "quotes": (b'{"x":"' + b'\\"' * MANY + b'","model":"a","model":"b"}', "unclear"),
    "decoys": (b'{"x":[' + b'"model",' * MANY + b'1],"mod\\u0065l":"a"}', "unclear"),
    "behind": (b'{"mod\\u0065l":"a","x":[' + b"{}," * MANY + b"1]}", "unclear"),
    "backslashes": (b'{"x":"' + b"\\" * MANY + b'","model":"a","model":"b"}', "model"),
    "backslashes and a quote": (b'{"x":"' + b"\\" * (MANY + 1) + b'"","model":"a","model":"b"}', "model"),
    "digits": (b'{"x":[' + b"1," * MANY + b'1],"model":"a","model":"b"}', "model"),
}


@pytest.mark.parametrize("name", HEAVY)
def test_no_body_is_walked_through_token_by_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies made for it: judged, or refused, after a bounded number of steps."""

    class Counted:
        steps = 0

        def search(self, body: bytes, at: int) -> re.Match[bytes] | None:
            self.steps += 1
            return pattern.search(body, at)

    pattern, counted = fields._NEXT, Counted()
    monkeypatch.setattr(fields, "_NEXT", counted)
    body, verdict = HEAVY[name]
    msgspec.json.decode(body, type=msgspec.Raw)  # valid: only such bodies come here
    try:
        assert repeated(body, "model", "stream") == verdict
    except Unclear:
        assert verdict == "unclear"
    assert counted.steps <= MOST_TOKENS


def test_a_long_conversation_is_no_reason_to_refuse() -> None:
    """What clients send: a conversation of any size, tools with a property called model, the name behind all of it."""
    turns = [{"role": "user", "content": f'the "model" {number}'} for number in range(MOST_TOKENS)]
    tools = [{"type": "function", "function": {"parameters": {"properties": {"model": {}, "stream": {}}}}}] * 50
    body = json.dumps({"messages": turns, "tools": tools, "model": "chat", "stream": True}).encode()
    assert may_repeat(body, b'"model"', b'"stream"')
    assert repeated(body, "model", "stream") is None
    assert json.loads(renamed(body, b"application/json", "llama")) == {**json.loads(body), "model": "llama"}
    with pytest.raises(Unclear):
        repeated(body.replace(b'"messages"', b'"massages"'), "model")


# -- forms -------------------------------------------------------------------------------------------------------------

TYPE = b'multipart/form-data; boundary="-b0"'


def form(*parts: bytes, end: bytes = b"---b0--\r\n") -> bytes:
    return b"".join(b"---b0\r\n" + part + b"\r\n" for part in parts) + end


def part(name: bytes, value: bytes, more: bytes = b"") -> bytes:
    return b'Content-Disposition: form-data; name="%b"%b\r\n\r\n%b' % (name, more, value)


FILE = part(b"file", bytes(range(256)) + b"\r\n--b0\r\n---b\r\n", b'; filename="a.wav"\r\nContent-Type: audio/wav')


def values_of(body: bytes, content_type: bytes = TYPE) -> list[tuple[bytes, bytes]]:
    return [(name, body[start:end]) for name, start, end in multipart.parts(body, content_type)]


def test_a_form_is_read_with_the_model_behind_the_file() -> None:
    body = form(FILE, part(b"model", b"whisper"), part(b"empty", b""))
    file, model, empty = values_of(body)
    assert file == (b"file", bytes(range(256)) + b"\r\n--b0\r\n---b\r\n")
    assert (model, empty) == ((b"model", b"whisper"), (b"empty", b""))
    assert values_of(b"\r\n" + body) == values_of(body)
    changed = renamed(body, TYPE, "other")
    assert changed == body.replace(b"\r\n\r\nwhisper\r\n", b"\r\n\r\nother\r\n")


@pytest.mark.parametrize(
    "content_type",
    [
        b"multipart/form-data; boundary=-b0",
        b"Multipart/Form-Data ;BOUNDARY=-b0 ; charset=utf-8",
        b'multipart/form-data; charset="a;boundary=x"; boundary="-b0";',
        b'multipart/form-data; boundary="\\-b0"',
    ],
)
def test_content_types_of_a_form(content_type: bytes) -> None:
    assert multipart.is_form(content_type)
    assert values_of(form(part(b"model", b"a")), content_type) == [(b"model", b"a")]


@pytest.mark.parametrize(
    "content_type", [b"", b"application/json", b"multipart/form-datax; boundary=a", b"multipart/mixed; boundary=a"]
)
def test_other_content_types(content_type: bytes) -> None:
    assert not multipart.is_form(content_type)


@pytest.mark.parametrize(
    "content_type",
    [
        b"multipart/form-data",
        b"multipart/form-data; boundary=",
        b'multipart/form-data; boundary=""',
        b"multipart/form-data; boundary=-b0; boundary=-b1",
        b"multipart/form-data; boundary=-b0 x",
        b'multipart/form-data; boundary="-b0',
        b"multipart/form-data; x; boundary=-b0",
    ],
)
def test_boundaries_that_two_readers_could_see_differently(content_type: bytes) -> None:
    with pytest.raises(ValueError, match=r"boundary|parameter"):
        values_of(form(part(b"model", b"a")), content_type)


MODEL = part(b"model", b"a")
ODD_FORMS = {
    "empty": b"",
    "preamble": b"hello\r\n" + form(MODEL),
    "no end": form(MODEL, end=b""),
    "cut in a part": form(MODEL)[:-20],
    "cut in a head": b"---b0\r\nContent-Disposition: form-data",
    "longer boundary": form(b"Content-Disposition: form-data; name=\"x\"\r\n\r\ny\r\n---b0x\r\n" + MODEL),
    "bare LF": form(MODEL).replace(b"\r\n", b"\n"),
    "bare LF in a head": form(MODEL.replace(b"\r\n\r\n", b"\nx: y\r\n\r\n")),
    "folded": form(MODEL.replace(b"; name", b";\r\n name")),
    "space before colon": form(MODEL.replace(b":", b" :")),
    "no name": form(b"Content-Disposition: form-data\r\n\r\na"),
    "no disposition": form(b"Content-Type: text/plain\r\n\r\na"),
    "no value": form(end=MODEL[:-1].join((b"---b0\r\n", b"---b0--\r\n"))),
    "no head": form(b"\r\na"),
    "attachment": form(b'Content-Disposition: attachment; name="model"\r\n\r\na'),
    "two dispositions": form(b'Content-Disposition: form-data; name="x"\r\n' + MODEL),
    "two names": form(part(b"x", b"a", b'; name="model"')),
    "extended name": form(b"Content-Disposition: form-data; name*=utf-8''model\r\n\r\na"),
    "extended name too": form(part(b"x", b"a", b"; name*=utf-8''model")),
    "name in pieces": form(b"Content-Disposition: form-data; name*0=mod; name*1=el\r\n\r\na"),
    "unended quote": form(b'Content-Disposition: form-data; name="model\r\n\r\na'),
    "parameter without a value": form(b'Content-Disposition: form-data; x; name="model"\r\n\r\na'),
    "nul": form(part(b"mo\x00del", b"a")),
    "transfer encoding": form(b"Content-Transfer-Encoding: base64\r\n" + part(b"model", b"YQ==")),
    "endless head": form(b"x: " + b"y" * 9000 + b"\r\n" + MODEL),
    "too many parts": form(*[MODEL] * 1001),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD_FORMS)
def test_forms_that_two_readers_could_see_differently(name: str) -> None:
    with pytest.raises(ValueError, match=r"its own boundary|one of its|parameter|1000 parts"):
        values_of(ODD_FORMS[name])


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (b"content-disposition:form-data;name=model", b"model"),
        (b'Content-Disposition: form-data; name="mo\\del"', b"model"),
        (b'Content-Disposition: form-data; name="a\\"b"', b'a"b'),
        (b'Content-Disposition: form-data; filename="; name=model"; name="file"', b"file"),
        (b'Content-Disposition: form-data; filename="\\"; name=\\"model"; name="file"', b"file"),
        (b'Content-Disposition: form-data; name="file"; filename*=utf-8\'\'%C3%A9; filename="\xc3\xa9"', b"file"),
        (b'X-Odd: name="model"\r\nContent-Disposition: FORM-DATA; NAME="x";', b"x"),
        (b'Content-Transfer-Encoding: 8BIT\r\nContent-Disposition: form-data; name="x"', b"x"),
    ],
)
def test_names_of_parts(head: bytes, name: bytes) -> None:
    assert values_of(form(head + b"\r\n\r\nv")) == [(name, b"v")]


@given(st.lists(st.tuples(st.sampled_from([b"model", b"file", b"x"]), st.binary(max_size=30)), max_size=5))
@settings(max_examples=200, deadline=None)
def test_forms_are_read_as_they_were_written(given_parts: list[tuple[bytes, bytes]]) -> None:
    body = form(*(part(name, value) for name, value in given_parts))
    if any(b"---b0" in value for _, value in given_parts):
        return
    assert values_of(body) == given_parts


@given(st.binary(max_size=80), st.integers(0, 300))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_form_or_refused(noise: bytes, at: int) -> None:
    whole = form(FILE, MODEL)
    at %= len(whole)
    for body in (noise, whole[:at] + noise + whole[at:], whole[:at] + noise):
        try:
            found = values_of(body)
        except ValueError:
            continue
        assert len(found) <= 3


def test_fields_know_forms() -> None:
    with pytest.raises(KeyError):
        fields.renamed(form(FILE), TYPE, "x")
