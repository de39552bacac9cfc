"""No frame is lost or sent twice, whatever has arrived when a connection breaks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_entry.protocol.framing import ProtocolError
from worker_entry.protocol.resend_buffer import ResendBuffer


@given(st.lists(st.sampled_from(["send", "deliver", "confirm", "drop"]), max_size=60))
def test_the_resend_buffer_delivers_every_frame_once_and_in_order(course: list[str]) -> None:
    """`way` is what was written and has not arrived; a drop loses it."""
    outbox, arrived, way, sent = ResendBuffer(), list[bytes](), list[bytes](), 0
    for step in [*course, "drop", "deliver"]:
        if step == "send":
            sent += 1
            outbox.add(b"%d" % sent)
            way.append(b"%d" % sent)
        elif step == "deliver":
            arrived += way
            way.clear()
        elif step == "confirm":
            outbox.confirm(len(arrived))
        else:
            way[:] = outbox.after(len(arrived))
    assert arrived == [b"%d" % number for number in range(1, sent + 1)]


def test_the_resend_buffer_rejects_impossible_counts() -> None:
    outbox = ResendBuffer()
    outbox.add(b"1")
    outbox.confirm(1)
    with pytest.raises(ProtocolError):
        outbox.confirm(2)
    for count in (0, 2):  # 0 is confirmed, and so forgotten; 2 was never sent
        with pytest.raises(ProtocolError):
            outbox.after(count)


def test_a_frame_that_is_taken_back_was_never_sent() -> None:
    outbox = ResendBuffer()
    for number in range(1, 6):
        outbox.add(b"%d" % number)
    outbox.confirm(2)
    outbox.take_back(4)
    assert (outbox.last, outbox.after(2)) == (4, [b"3", b"5"])


def test_a_new_controller_counts_on_from_what_has_arrived() -> None:
    outbox = ResendBuffer()
    outbox.add(b"a")
    outbox.follow(7, 4)
    assert (outbox.last, outbox.received, outbox.confirmed) == (8, 4, 7)
    with pytest.raises(ProtocolError, match="a confirmation of 9 frames, but only 8 were sent"):
        outbox.confirm(9)
    with pytest.raises(ProtocolError, match="6 frames received, which is not between 7 and 8"):
        outbox.after(6)
