"""Frames: every message arrives unchanged, and invalid frames are rejected at a bounded cost."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import tracemalloc
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_entry.protocol.collection import FileRead
from worker_entry.protocol.costs import FRAME_LIMIT, cost_of
from worker_entry.protocol.field_limits import (
    BODY_LIMIT,
    FLOAT_LIMIT,
    LARGEST,
    ExactlyOne,
    Limit,
    Matches,
    OfSender,
    Path,
    Text,
    Within,
)
from worker_entry.protocol.framing import HEADER_LIMIT, Decoder, ProtocolError, encode, hints, marked, parse
from worker_entry.protocol.messages import Exited, Log, Message, Noted, ToController
from worker_entry.protocol.orders import Beat, Goodbye, Input, Piece, Start, ToAgent
from worker_entry.protocol.samples import TaskSample

Frame = tuple[Message, bytes]

TYPES: list[type[Any]] = [*get_args(ToAgent), *(kind for kind in get_args(ToController) if kind is not Beat)]


def decode(data: bytes) -> list[Frame]:
    return list(Decoder().feed(data))


def header(kind: str, **fields: object) -> bytes:
    return json.dumps({"type": kind, **fields}).encode() + b"\n"


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a field's type within its limits, including strings with any code point where allowed."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return limited(kind.__origin__, kind.__metadata__)
    if origin is Union:
        return st.none() | values(arguments[0])
    if origin is list:
        return st.lists(values(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=3)
    if dataclasses.is_dataclass(kind):
        fields = {name: values(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}
        return st.builds(kind, **fields)  # type: ignore[arg-type]
    simple: dict[Any, st.SearchStrategy[Any]] = {
        str: st.text(st.characters(), max_size=20),
        int: st.integers(-LARGEST, LARGEST),
        bool: st.booleans(),
        float: st.floats(min_value=-FLOAT_LIMIT, max_value=FLOAT_LIMIT, exclude_min=True, exclude_max=True),
    }
    return simple[kind]


def limited(kind: Any, limits: tuple[Limit, ...]) -> st.SearchStrategy[Any]:
    for limit in limits:
        if isinstance(limit, Within):
            return st.integers(limit.least, limit.most)
        if isinstance(limit, Text):
            left_out: list[Any] = ["Cs"] if limit.lines else ["Cs", "Cc", "Zl", "Zp"]
            return st.text(st.characters(exclude_categories=left_out), max_size=20)
        if isinstance(limit, Path):
            paths = st.binary(max_size=20).map(lambda name: name.replace(b"\0", b"").decode("utf-8", "surrogateescape"))
            return paths.filter(functools.partial(fits, limit))
        if isinstance(limit, Matches):
            return st.from_regex(limit.pattern, fullmatch=True).filter(functools.partial(fits, limit))
        if isinstance(limit, ExactlyOne):
            return values(kind).filter(functools.partial(fits, limit))
    return values(kind)


def fits(limit: Limit, value: Any) -> bool:
    try:
        limit.take(value)
    except ValueError:
        return False
    return True


def with_body(message: Message, body: bytes) -> Frame:
    if isinstance(message, (FileRead, Input, Log, Piece)):
        return dataclasses.replace(message, length=len(body)), body
    return message, b""


frames: st.SearchStrategy[Frame] = st.builds(
    with_body, st.one_of([values(kind) for kind in TYPES]), st.binary(max_size=300)
)
HELLO = {"version": 1, "run_id": "", "directory": "", "cwd": "", "lease_s": 1, "stream_logs": True}


# --- valid frames ---


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
def test_every_message_type_survives_encoding_and_decoding(kind: type[Any]) -> None:
    @given(values(kind), st.binary(max_size=300))
    def arrives(message: Message, data: bytes) -> None:
        sent, body = with_body(message, data)
        assert decode(encode(sent, body)) == [(sent, body)]

    arrives()


@given(st.lists(frames, max_size=5), st.randoms(use_true_random=False), st.integers(1, 400))
def test_the_decoder_yields_the_same_frames_for_pieces_of_any_size(
    sent: list[Frame], choose: random.Random, longest: int
) -> None:
    data = b"".join(encode(*frame) for frame in sent)
    decoder = Decoder()
    received: list[Frame] = []
    while data:
        cut = choose.randint(1, longest)
        received += decoder.feed(data[:cut])
        data = data[cut:]
    assert received == sent


@given(frames)
def test_a_frame_header_is_always_one_line_of_ascii(frame: Frame) -> None:
    message, body = frame
    data = encode(message, body)
    line = data[: len(data) - len(body)]
    assert line.isascii()
    assert line.index(b"\n") == len(line) - 1


def test_a_frame_body_may_contain_any_bytes() -> None:
    everything = bytes(range(256)) * 2 + b'\n{"type":"Goodbye"}\n'
    log = Log(1, "worker:0", 0, len(everything))
    data = encode(log, everything)
    assert data.endswith(everything)
    assert decode(data + encode(Goodbye())) == [(log, everything), (Goodbye(), b"")]


def test_a_frame_body_of_the_maximum_length_is_accepted() -> None:
    log, body = Log(1, "worker:0", 0, BODY_LIMIT), bytes(BODY_LIMIT)
    assert decode(encode(log, body)) == [(log, body)]


def test_a_frame_is_delivered_with_its_last_byte_and_not_before() -> None:
    decoder = Decoder()
    data = encode(Log(1, "worker:0", 0, 3), b"abc")
    for position in range(len(data) - 1):
        assert list(decoder.feed(data[position : position + 1])) == []
    assert list(decoder.feed(data[-1:])) == [(Log(1, "worker:0", 0, 3), b"abc")]


def test_message_fields_with_a_default_may_be_missing() -> None:
    line = header("Exited", task="worker:0", exit={"code": 1}, time=2.5)
    assert decode(line) == [(parse(Exited, {"task": "worker:0", "exit": {"code": 1}, "time": 2.5}, "Exited"), b"")]


# --- invalid frames ---


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"hello\n", r"not a header: b'hello'"),
        (b"\n", "not a header"),
        (b"\xff\xfe\x00\n", "not a header"),
        (b"\xc3\x28\n", "not a header"),
        (b"[" * 50_000 + b"\n", "not a header"),
        (b'{"a":' * 10_000 + b"\n", "not a header"),
        (b"null\n", "without a type"),
        (b"[]\n", "without a type"),
        (b"{}\n", "without a type"),
        (b'{"type":1}\n', "without a type"),
        (header("Surprise"), "unknown frame type 'Surprise'"),
        (header("TaskExit", code=1), "unknown frame type 'TaskExit'"),  # a value, no message
        (header("Stop"), "Stop: field 'grace_s' is missing"),
        (header("Stop", grace_s=1, force=True), "Stop: unknown field 'force'"),
        (header("Stop", grace_s="1"), "Stop.grace_s: expected float, got str"),
        (header("Stop", grace_s=True), "Stop.grace_s: expected float, got bool"),
        (header("Stop", grace_s=None), "Stop.grace_s: expected float, got NoneType"),
        (b'{"type":"Stop","grace_s":NaN}\n', "Stop.grace_s: nan is out of range"),
        (b'{"type":"Stop","grace_s":-Infinity}\n', "Stop.grace_s: -inf is out of range"),
        (b'{"type":"Stop","grace_s":1e999}\n', "Stop.grace_s: inf is out of range"),
        (b'{"type":"Stop","grace_s":1' + b"0" * 400 + b"}\n", "Stop.grace_s: 10*[.]* is out of range"),
        (b'{"type":"Stop","grace_s":1' + b"0" * 5000 + b"}\n", "not a header|is out of range"),
        (header("Prepared", attempt=True, ports={}), "Prepared.attempt: expected int, got bool"),
        (header("Prepared", attempt=1.0, ports={}), "Prepared.attempt: expected int, got float"),
        (header("Prepared", attempt=1, ports={"ps:0": "1"}), r"Prepared.ports\['ps:0'\]: expected int, got str"),
        (header("Prepared", attempt=1, ports={"a": 1}), r"Prepared.ports\['a'\]: 'a' is not a task"),
        (header("Prepared", attempt=1, ports={"worker:00": 1}), "'worker:00' is not a task"),
        (header("Prepared", attempt=1, ports={"worker:0": 0}), "0 is not between 1 and 65535"),
        (header("Prepared", attempt=-1, ports={}), "Prepared.attempt: -1 is not between"),
        (header("Synced", directory="", files=0, fetched=10**400), "fetched: a number of 1329 bits is out of range"),
        (header("Synced", directory="", files=-1, fetched=0), "files: -1 is not between"),
        (header("Hello", **{**HELLO, "lease_s": 10**400}), "Hello.lease_s: 10*[.]* is out of range"),
        (header("Exited", task="worker:0", time=1, exit={}), "exactly one of code and signal must be given"),
        (
            header("Exited", task="worker:0", time=1, exit={"code": 1, "signal": 9}),
            "exactly one of code and signal must be given",
        ),
        (header("Exited", task="worker:0", time=1, exit={"code": 256}), "256 is not between 0 and 255"),
        (
            header("Refused", problems=[{"reference": "succeeded", "message": ""}]),
            "'succeeded' is not a problem reference",
        ),
        (header("Refused", problems=[{"reference": "A b", "message": ""}]), "'A b' is not a problem reference"),
        (
            header("Refused", problems=[{"reference": "a", "message": "", "task": "worker:0/.."}]),
            "'worker:0/..' is not a task",
        ),
        (header("Cleaned", ended=0, left=[1] * 100_001), "100001 items; at most 100000 are allowed"),
        (header("Prepared", attempt=1, ports=[]), "Prepared.ports: expected dict.*, got list"),
        (header("Prepare", attempt=1, tasks={}, first_port=1, last_port=2), "Prepare.tasks: expected .*, got dict"),
        (header("Start", attempt=1, tasks=[5]), r"Start.tasks\[0\]: expected TaskStart, got int"),
        (header("Start", attempt=1, tasks=[{"task": "a"}]), r"Start.tasks\[0\]: field 'program' is missing"),
        (header("Exited", task="ps:0", time=1, exit=[]), "Exited.exit: expected TaskExit, got list"),
        (header("Exited", task="ps:0", time=1, exit={"code": True}), "Exited.exit.code: expected int, got bool"),
        (
            header("Hello", **{**HELLO, "stream_logs": 1}),
            "Hello.stream_logs: expected bool, got int",
        ),
        (header("Log", attempt=1, task="ps:0", offset=0, length=-1), "Log.length: -1 is not between"),
        (header("Log", attempt=1, task="ps:0", offset=0, length=BODY_LIMIT + 1), "Log.length: .* is not between"),
        (header("Log", attempt=1, task="ps:0", offset=0, length=4 << 30), "Log.length: 4294967296 is not between"),
    ],
)
def test_an_invalid_frame_is_rejected_with_the_reason(data: bytes, said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        decode(data)


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_random_bytes_raise_only_a_protocol_error(pieces: list[bytes]) -> None:
    decoder = Decoder()
    try:
        for piece in pieces:
            for _ in decoder.feed(piece):
                pass
    except ProtocolError:
        pass


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.data())
def test_frames_with_wrong_values_raise_only_a_protocol_error(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(TYPES))
    line = json.loads(encode(data.draw(values(kind))))
    spot = line
    while True:  # descends to a random place, to replace the value there
        name = data.draw(st.sampled_from(list(spot) if isinstance(spot, dict) else range(len(spot))))
        if not (isinstance(spot[name], (dict, list)) and spot[name]) or data.draw(st.booleans()):
            break
        spot = spot[name]
    spot[name] = data.draw(json_values)
    try:
        received = decode(json.dumps(line).encode() + b"\n")
    except ProtocolError:
        return
    for message, _ in received:  # what was accepted has the right types, otherwise it could not be sent on
        assert decode(encode(message)) == [(message, b"")]


@pytest.mark.parametrize("kind", get_args(ToController), ids=lambda kind: kind.__name__)
def test_every_field_of_a_message_from_a_node_has_limits(kind: type[Any]) -> None:
    def unlimited(kind: Any, where: str) -> list[str]:
        origin, arguments = get_origin(kind), get_args(kind)
        if dataclasses.is_dataclass(kind):
            return [found for name, hint in hints(kind).items() for found in unlimited(hint, f"{where}.{name}")]
        if origin is Annotated:
            inner = kind.__origin__ if get_origin(kind.__origin__) is not None else None
            parts = get_args(inner) if inner is not None else ()
            return [found for part in parts for found in unlimited(part, where)]
        if origin is Union:
            return unlimited(arguments[0], where)
        return [] if kind in (float, bool) else [where]  # a float always has limits

    assert unlimited(kind, kind.__name__) == []


def test_every_task_named_by_a_node_message_is_marked_as_its_own() -> None:
    def names(kind: Any) -> list[str]:
        return [name for name, hint in hints(kind).items() if "task" in name or "ports" in name]

    for kind in get_args(ToController):
        for name in names(kind):
            value: Any = {"worker:7": 1} if name == "ports" else "worker:7"
            if name == "tasks":
                value = [TaskSample("worker:7", 0.5, 1)]
            assert list(marked(hints(kind)[name], value, OfSender)) == ["worker:7"], f"{kind.__name__}.{name}"


def test_surrogates_in_messages_become_escapes_and_long_text_is_cut() -> None:
    line = json.loads(encode(Noted("a")))
    [(noted, _)] = decode(json.dumps({**line, "text": "caf\udce9 \ud83d" + "x" * 20_000}).encode() + b"\n")
    assert isinstance(noted, Noted)
    assert noted.text.startswith("caf\\udce9 \\ud83dxxx")
    assert (len(noted.text), noted.text[-1]) == (8192, "…")


def test_a_protocol_error_is_short_even_for_long_input() -> None:
    long = "x" * 1_000_000
    for data in (long.encode() + b"\n", header(long), header("Stop", grace_s=1, **{long[:60_000]: 1})):
        with pytest.raises(ProtocolError) as caught:
            decode(data)
        assert len(str(caught.value)) < 300


# --- bounded cost ---


@pytest.mark.parametrize("piece", [1 << 16, HEADER_LIMIT + (1 << 16)])
def test_an_endless_frame_header_is_rejected_at_the_limit(piece: int) -> None:
    decoder, fed = Decoder(), 0

    def feed_on() -> None:
        nonlocal fed
        while fed <= 2 * HEADER_LIMIT:
            fed += piece
            assert list(decoder.feed(b"x" * piece)) == []

    with pytest.raises(ProtocolError, match="a header of more than"):
        feed_on()
    assert fed <= HEADER_LIMIT + 2 * piece


def test_a_long_frame_header_below_the_limit_is_accepted() -> None:
    start = Start(1, [], {"worker": ["x" * (HEADER_LIMIT - 1000)]})
    assert decode(encode(start)) == [(start, b"")]


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
def test_a_header_too_long_for_its_message_type_is_rejected_early(kind: type[Any]) -> None:
    limit = cost_of(kind).header
    begins = b'{"type":"%s",' % kind.__name__.encode()
    decoder = Decoder()
    assert list(decoder.feed(begins.ljust(limit))) == []
    with pytest.raises(ProtocolError, match=f"a header of more than {limit} bytes .{kind.__name__}."):
        list(decoder.feed(b" "))


def test_a_header_with_an_unrecognised_type_has_the_default_limit() -> None:
    with pytest.raises(ProtocolError, match=f"a header of more than {FRAME_LIMIT} bytes"):
        decode(b' {"type":"Start","attempt":1,' + b" " * FRAME_LIMIT)


def test_the_decoder_accepts_only_messages_of_the_other_side() -> None:
    decoder = Decoder(ToController)
    assert list(decoder.feed(encode(Noted("x")))) == [(Noted("x"), b"")]
    with pytest.raises(ProtocolError, match="unexpected frame type 'Goodbye'"):
        list(decoder.feed(encode(Goodbye())))


def test_decoder_memory_does_not_grow_with_the_data_received() -> None:
    data = encode(Log(1, "worker:0", 0, 1 << 16), bytes(1 << 16))
    decoder = Decoder()
    tracemalloc.start()
    try:
        for _ in range(500):  # 32 MB
            for start in range(0, len(data), 10_000):
                for _frame in decoder.feed(data[start : start + 10_000]):
                    pass
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_the_decoder_searches_a_header_in_small_pieces_only_once() -> None:
    """16 MB in pieces of 4 KB: searching it from its beginning each time would be 32 GB."""
    decoder = Decoder()
    assert list(decoder.feed(b'{"type":"Start",')) == []
    for _ in range(HEADER_LIMIT // 4096 - 1):
        assert list(decoder.feed(b" " * 4096)) == []
    with pytest.raises(ProtocolError, match="not a header"):
        list(decoder.feed(b"\n"))
