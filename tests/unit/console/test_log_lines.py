"""How the console shows a log: the same lines for pieces of any size, no control sequences, no chatter."""

from __future__ import annotations

import re
import tracemalloc
import unicodedata
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.console import log_lines
from launcher.console.log_lines import LogLines, Tracebacks
from launcher.printable import printable
from tests.harness.places import PROGRAMS

CHATTER = PROGRAMS / "chatty_tensorflow.txt"
"""What TensorFlow 2.21 on a machine without GPUs wrote to the logs of a run of two workers, until training began."""

TURNING = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029"

ABSL = b"I0000 00:00:1795226239.666849   28543 grpc_server_lib.cc:467] Started server with target: grpc://[::]:1"


def shown(data: bytes, pieces: Sequence[int] = (), *, keep_colours: bool = False, fold: bool = True) -> list[bytes]:
    """The lines of a whole log that is fed in pieces of these sizes, and the rest at once."""
    lines = LogLines(keep_colours=keep_colours, fold=fold)
    result = b""
    for size in pieces:
        result += lines.feed(data[:size])
        data = data[size:]
    result += lines.feed(data) + lines.close()
    assert result.endswith(b"\n") or not result
    return result.split(b"\n")[:-1]


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "LINE_LIMIT", 24)
    monkeypatch.setattr(log_lines, "PARTIAL_LIMIT", 40)


# These few words produce many rewritten, blank, coloured, overlong and folded lines.
WORDS = (
    *(bytes([byte]) for byte in b"\n\n\n\r\r\b\t \x1b[m;0ab\x00\x07\x7f\x80\xc3\xa9\xff"),
    b"   ",
    b"\x1b[31m",
    b"\x1b[2K",
    b"\xc2\x9b",
    "\u202e".encode(),
    b"\x1b]52;c;",
    b"xxxxxxxxxxxxxxxxxxxxxxxxx",
    b"\n" + ABSL + b"\n",
    b"\n/job:worker/replica:0/task:1\n",
    "né\n".encode(),
)
logs = st.lists(st.one_of(st.sampled_from(WORDS), st.binary(max_size=4)), max_size=30).map(b"".join)
cuts = st.lists(st.integers(0, 30), max_size=20)


class TestPieces:
    @given(logs, cuts, st.booleans(), st.booleans())
    def test_log_pieces_of_any_size_give_the_same_lines(
        self, data: bytes, pieces: list[int], colours: bool, fold: bool
    ) -> None:
        assert shown(data, pieces, keep_colours=colours, fold=fold) == shown(data, keep_colours=colours, fold=fold)

    @pytest.mark.usefixtures("small_limits")
    def test_overlong_lines_are_cut_alike_for_pieces_of_any_size(self) -> None:
        @given(logs, cuts)
        def check(data: bytes, pieces: list[int]) -> None:
            at_once = shown(data)
            assert shown(data, pieces) == at_once
            assert shown(data, [1] * len(data)) == at_once

        check()

    @pytest.mark.usefixtures("small_limits")
    @pytest.mark.parametrize(
        ("data", "lines"),
        [
            (b"100%\r   \n", [b"100%"]),
            (b"100%\r   \rnext\n", [b"next"]),
            (b"\r   \n", [b""]),
            (b"   \n", [b"   "]),
            (b"\r", [b""]),
            (b"ab\r" + b"x" * 41 + b"\rcd\n", [b"x" * 24 + b"... (cut here; the log has the whole line)"]),
            (b"x" * 41 + b"\rcd\nnext", [b"x" * 24 + b"... (cut here; the log has the whole line)", b"next"]),
            (b"x" * 40 + b"\r" + b"y" * 24 + b"\n", [b"y" * 24]),
            ("a│\x1b[3".encode(), ["a│␛3".encode()]),
            (b"one\b\b\rtwo", [b"two"]),
        ],
    )
    @pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
    def test_the_shown_lines_do_not_depend_on_where_a_log_is_split(
        self, data: bytes, lines: list[bytes], size: int
    ) -> None:
        assert shown(data, [size] * len(data)) == lines

    @given(
        st.lists(st.text(st.characters(categories=["L", "N", "P", "S", "Zs"], exclude_characters="\xa0"), max_size=20))
    )
    def test_plain_text_of_a_log_is_shown_unchanged(self, lines: list[str]) -> None:
        data = "".join(f"{line}\n" for line in lines).encode()

        assert shown(data, [7, 1, 30]) == [line.encode() for line in lines]

    def test_a_last_line_without_a_line_break_is_shown_when_the_log_ends(self) -> None:
        lines = LogLines()

        assert lines.feed(b"one\ntw") == b"one\n"
        assert lines.feed(b"o") == b""
        assert lines.unfinished == b"two"
        assert (lines.close(), lines.close()) == (b"two\n", b"")

    def test_a_log_piece_that_ends_at_a_line_break_leaves_no_unfinished_line(self) -> None:
        lines = LogLines()

        assert lines.feed(b"one\n\n") == b"one\n\n"
        assert (lines.unfinished, lines.close()) == (b"", b"")


class TestRewrittenLines:
    KERAS = b"".join(
        b"\r\x1b[1m%2d/10\x1b[0m \x1b[32m%s\x1b[0m\x1b[37m%s\x1b[0m \x1b[1m1s\x1b[0m 10ms/step - loss: 0.%d"
        % (step, "━".encode() * step, "━".encode() * (10 - step), 10 - step)
        + b"\b" * 60
        for step in range(1, 11)
    )

    def test_a_rewritten_progress_bar_is_shown_in_its_final_state(self) -> None:
        bar = "10/10 ━━━━━━━━━━ 1s 10ms/step - loss: 0.0"

        assert shown(b"Epoch 1/1\n" + self.KERAS + b"\nDone\n") == [b"Epoch 1/1", bar.encode(), b"Done"]

    def test_an_unfinished_progress_bar_has_its_current_state(self) -> None:
        lines = LogLines()
        lines.feed(self.KERAS[: self.KERAS.index(b"\r", 400)])

        assert lines.unfinished.decode().startswith(" 3/10 ━━━━━━━━━━ 1s")

    def test_a_rewritten_line_uses_bounded_memory(self) -> None:
        lines = LogLines()
        tracemalloc.start()
        for step in range(5_000):
            lines.feed(b"\r%d of 5000 %s" % (step, b"." * 200))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()

        assert lines.unfinished.startswith(b"4999 of 5000")
        assert peak < 50_000

    def test_a_rewritten_line_that_ends_blank_shows_its_last_text(self) -> None:
        assert shown(b"\r50%\r100%\r      \rnext\n") == [b"next"]
        assert shown(b"\r50%\r100%\r      \n") == [b"100%"]

    def test_lines_with_windows_line_breaks_are_shown_completely(self) -> None:
        assert shown(b"one\r\ntwo\r\n\r\n") == [b"one", b"two", b""]


class TestControlSequences:
    @pytest.mark.parametrize(
        ("obeyed", "seen"),
        [
            (b"\x1b[A", "␛"),
            (b"\x1b[10;20H", "␛"),
            (b"\x1b[2J", "␛"),
            (b"\x1b[K", "␛"),
            (b"\x1b[?25l", "␛"),
            (b"\x1b[>4;1m", "␛"),
            (b"\x1b7", "␛"),
            (b"\x1bM", "␛"),
            (b"\x1bc", "␛"),
            (b"\x1b(B", "␛"),
            (b"\x1b]0;a title\x07", "␛"),
            (b"\x1b]52;c;aGVsbG8=\x1b\\", "␛"),
            (b"\x1b]8;;http://x\x1b\\", "␛"),
            (b"\x1bPq#0\x1b\\", "␛"),
            (b"\xc2\x9d0;a title\xc2\x9c", r"\x9d"),
            (b"\xc2\x9b2J", r"\x9b"),
            (b"\xc2\x85", r"\x85"),
            (b"\x00", "␀"),
            (b"\x07", "␇"),
            (b"\x0b", "␋"),
            (b"\x0c", "␌"),
            (b"\x0e", "␎"),
            (b"\x1b", "␛"),
            (b"\x7f", "␡"),
            ("\u202e".encode(), r"\u202e"),
            ("\u2066".encode(), r"\u2066"),
            ("\u2028".encode(), r"\u2028"),
            (b"\xc2\x07\x9b2J", "\ufffd␇\ufffd2J"),  # bytes around a removed byte do not join
            (b"\x1b\x00[2J", "␛␀[2J"),
            (b"\x1b\x1b[31m[2J", "␛[2J"),
        ],
    )
    @pytest.mark.parametrize("colours", [True, False])
    def test_control_sequences_except_colours_are_replaced_by_visible_symbols(
        self, obeyed: bytes, seen: str, colours: bool
    ) -> None:
        (line,) = shown(b"before" + obeyed + b"\nafter\n", keep_colours=colours)[:1]

        assert re.sub(r"\x1b\[\d*m", "", line.decode()) == f"before{seen}"

    def test_kept_colours_are_reset_at_the_end_of_the_line(self) -> None:
        assert shown(b"\x1b[1;31mred\nplain\n", keep_colours=True) == [b"\x1b[1;31mred\x1b[0m", b"plain"]

    def test_colours_of_a_log_are_removed_by_default(self) -> None:
        assert shown(b"\x1b[1;31mred\x1b[m\nplain\n") == [b"red", b"plain"]

    @given(logs, st.booleans())
    def test_shown_lines_have_no_control_characters_except_colours(self, data: bytes, colours: bool) -> None:
        for line in shown(data, keep_colours=colours):
            text = re.sub(r"\x1b\[[0-9;]*m", "", line.decode()) if colours else line.decode()

            assert not [char for char in text if unicodedata.category(char) == "Cc" and char != "\t"]
            assert not set(text) & set(TURNING)

    @given(st.lists(st.one_of(st.sampled_from(WORDS), st.binary(max_size=3))).map(b"".join), st.booleans())
    def test_shown_bytes_have_no_sequence_that_a_terminal_would_execute(self, data: bytes, colours: bool) -> None:
        """Reading byte by byte or as UTF-8 finds no sequences except colours."""
        for line in shown(data.replace(b"\n", b" "), keep_colours=colours, fold=False):
            bare = re.sub(rb"\x1b\[[0-9;:]*m", b"", line) if colours else line
            assert b"\x1b" not in bare
            assert not re.search(rb"[\x00-\x08\x0a-\x1f\x7f]", bare)
            assert not re.search("[\x80-\x9f]", bare.decode())

    @given(st.text(st.characters()))
    def test_printable_replaces_all_control_characters_of_any_text(self, text: str) -> None:
        clean = printable(text)
        assert not [char for char in clean if unicodedata.category(char) in ("Cc", "Cs") and char not in "\n\t"]
        assert not set(clean) & set(TURNING)
        assert printable(clean) == clean

    def test_printable_replaces_escape_sequences_by_visible_symbols(self) -> None:
        text = "\x1b[31mred \udce9 \x1b]0;t\x07x\ty\nz\r\x9b2J \u202egpj.exe"
        assert printable(text) == r"␛[31mred \udce9 ␛]0;t␇x" "\ty\nz␍" r"\x9b2J \u202egpj.exe"


class TestBytes:
    def test_log_bytes_that_are_not_utf_8_are_replaced(self) -> None:
        assert shown(b"caf\xe9 \xff\xfe\n") == ["caf\ufffd \ufffd\ufffd".encode()]

    @given(logs)
    def test_shown_lines_are_valid_utf_8_for_any_log(self, data: bytes) -> None:
        for line in shown(data):
            line.decode()


class TestLongLines:
    CUT = b"... (cut here; the log has the whole line)"

    def test_long_log_lines_are_cut_after_8192_bytes(self) -> None:
        assert shown(b"x" * 8192 + b"\n" + b"y" * 8193 + b"\nz\n") == [b"x" * 8192, b"y" * 8192 + self.CUT, b"z"]

    def test_long_log_lines_are_not_cut_within_a_character(self) -> None:
        (line,) = shown("━".encode() * 4000 + b"\n")

        assert line == "━".encode() * 2730 + self.CUT

    def test_a_line_of_10_mb_is_shown_early_and_uses_bounded_memory(self) -> None:
        lines = LogLines()
        piece = b"x" * (64 << 10)
        tracemalloc.start()
        fed = [lines.feed(piece) for _ in range(160)]
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()

        assert b"".join(fed) == b"x" * 8192 + self.CUT + b"\n"
        assert fed[4] != b""
        assert peak < 1_500_000
        assert lines.unfinished == b""
        assert lines.feed(b"the end of it\nnext\n") == b"next\n"

    def test_a_line_of_10_mb_in_one_piece_is_cut(self) -> None:
        assert shown(b"x" * 10_000_000 + b"\nnext\n") == [b"x" * 8192 + self.CUT, b"next"]


def error(line: bytes) -> bytes:
    """The same line, as an error."""
    return line.replace(b": I ", b": E ").replace(b": W ", b": E ").replace(b"I0", b"E0", 1).replace(b"W0", b"E0", 1)


class TestChatter:
    def test_all_tensorflow_messages_of_a_normal_start_are_folded(self) -> None:
        data = CHATTER.read_bytes()
        lines = LogLines()

        assert lines.feed(data) == b""
        assert lines.folded == data.count(b"\n") > 20

    def test_tensorflow_messages_of_a_start_are_shown_if_folding_is_off(self) -> None:
        data = CHATTER.read_bytes()
        lines = LogLines(fold=False)

        assert lines.feed(data) == data
        assert lines.folded == 0

    OLDER = (
        b"2024-03-11 09:14:02.123456: I tensorflow/core/util/port.cc:113] oneDNN custom operations are on.",
        (
            b"2024-03-11 09:14:02.123456: E external/local_xla/xla/stream_executor/cuda/cuda_fft.cc:485] Unable to "
            b"register cuFFT factory: Attempting to register factory for plugin cuFFT when one has already been "
            b"registered"
        ),
        (
            b"2024-03-11 09:14:02.123456: W tensorflow/compiler/tf2tensorrt/utils/py_utils.cc:38] TF-TRT Warning: "
            b"Could not find TensorRT"
        ),
        (
            b"2024-03-11 09:14:02.123456: E external/local_xla/xla/stream_executor/cuda/cuda_driver.cc:152] failed "
            b"call to cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected"
        ),
        (
            b"E0000 00:00:1795393452.958900   27264 cpu_aot_loader.cc:220] Loading XLA:CPU AOT result. Target machine "
            b"feature +prefer-no-scatter is not  supported on the host machine."
        ),
        b"I0000 00:00:1710148442.123456    1234 gpu_device.cu.cc:19] Created device /job:worker/replica:0/task:0",
    )

    GONE = b"""E0000 00:00:1795307621.220620    6622 base_collective_executor.cc:252] \
BaseCollectiveExecutor::StartAbort UNAVAILABLE: Error reported from /job:worker/task:1: \
The following tasks are unhealthy (stopped sending heartbeats):
/job:worker/replica:0/task:1
The tasks have crashed. Check the task logs for an earlier error, or scheduler events (e.g. preemption, eviction) to \
debug further. [type.googleapis.com/tensorflow.CoordinationServiceError='']
W0000 00:00:1795307664.184153   12553 local_rendezvous.cc:412] Local rendezvous is aborting with status: UNAVAILABLE: \
Collective ops is aborted by: recvmsg:Connection reset by peer
Additional GRPC error information from remote target /job:worker/replica:0/task:0 while calling /tensorflow.Worker:
:UNKNOWN:Error received from peer  {grpc_status:14, grpc_message:"recvmsg:Connection reset by peer"}
The error could be from a previous operation. Restart your program to reset.
\t [[{{function_node __inference_one_step_550}}{{node CollectiveReduceV2}}]]
\t [[{{node CollectiveReduceV2}}]] [type.googleapis.com/tensorflow.DerivedStatus='']
E0000 00:00:1795307664.184093   12553 ring_alg.cc:291] Aborting RingReduce with UNAVAILABLE: Socket closed
2024-03-11 09:14:02.123456: E tensorflow/core/common_runtime/base_collective_executor.cc:249] \
BaseCollectiveExecutor::StartAbort ABORTED: Socket closed
"""

    def test_tensorflow_messages_about_a_lost_peer_are_folded(self) -> None:
        """The peer may have finished normally; if not, the program gets an exception that says the same."""
        lines = LogLines()
        assert lines.feed(self.GONE) == b""
        assert lines.folded == self.GONE.count(b"\n")

    def test_folding_of_a_lost_peer_message_ends_with_that_message(self) -> None:
        rest = [b"Epoch 2/3", *self.GONE.splitlines()[1:3]]
        assert shown(self.GONE + b"\n".join(rest) + b"\n") == rest

    @pytest.mark.parametrize(
        "line",
        [
            b"distlaunch: patched Keras 3.15.1 for multi-worker training: reduce_per_replica (--set keras.patch=false)",
            b"distlaunch: Keras 3.99.0 needs no patch for multi-worker training",
            b"distlaunch: Keras 3.99.0 no longer has the faults of reduce_per_replica, which need no patch",
            b"distlaunch: Keras 3.99.0 has changed this code, so it is not patched, and training may fail: fit",
        ],
    )
    def test_the_keras_patch_line_of_a_task_is_folded(self, line: bytes) -> None:
        assert shown(line + b"\n") == []

    @pytest.mark.parametrize("line", OLDER)
    def test_messages_of_older_tensorflow_and_of_gpus_are_folded(self, line: bytes) -> None:
        assert shown(line + b"\n") == []

    @pytest.mark.parametrize(
        "line",
        [
            # Errors, and lines that may be errors.
            (
                b"E0000 00:00:1795393452.958900   27264 cpu_aot_loader.cc:220] Loading XLA:CPU AOT result. Target "
                b"machine feature +avx512f is not  supported on the host machine."
            ),
            (
                b"E0000 00:00:1795226239.513345   28543 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA "
                b"error: Failed call to cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)"
            ),
            b"E0000 00:00:1795226239.513345   28543 coordination_service_agent.cc:755] Coordination agent is in ERROR",
            (
                b"E0000 00:00:1795307664.184093   12553 base_collective_executor.cc:252] "
                b"BaseCollectiveExecutor::StartAbort INTERNAL: Collective instance 151 expected type 0 but got type 2"
            ),
            b"distlaunch: Keras 3.9.0 is not patched: even with patches it would train wrongly on several workers",
            b"distlaunch: could not write the crash record: No space left on device",
            b"F0000 00:00:1795226239.513345   28543 client.cc:80] Terminating process because the service is gone",
            b"2024-03-11 09:14:02.123456: E tensorflow/core/grpc_server_lib.cc:601] Could not start gRPC server",
            b"2024-03-11 09:14:02.123456: F tensorflow/core/framework/tensor.cc:1] Check failed: 1 == 2",
            b"Traceback (most recent call last):",
            b'  File "/usr/lib/python3/tensorflow/util/port.cc.py", line 1, in <module>',
            b"tensorflow.python.framework.errors_impl.UnavailableError: /job:worker/replica:0/task:1 failed",
            b"Fatal Python error: Segmentation fault",
            # Warnings of trouble.
            (
                b"W0000 00:00:1795226239.513345   28543 bfc_allocator.cc:310] Allocator (GPU_0_bfc) ran out of memory "
                b"trying to allocate 2.00GiB"
            ),
            (
                b"2024-03-11 09:14:02.123456: W tensorflow/core/common_runtime/gpu/gpu_device.cc:2348] Cannot dlopen "
                b"some GPU libraries. Skipping registering GPU devices..."
            ),
            # A user's own lines.
            b"I1121 01:57:12.644315 140735 train.py:153] step 100, loss 0.5",
            b"W1121 01:57:12.644315 140735 train.py:153] loss is NaN",
            b"2024-03-11 09:14:02.123456: I train.py:10] step",
            b"2024-03-11 09:14:02,123 INFO train: step 100",
            b"INFO:tensorflow:step 100",
            b"WARNING:tensorflow:Collective ops is not configured at program startup.",
            b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR, says the book",
            b"Epoch 1/12",
            b"/job:worker/replica:0/task:1",
            b"To enable the following instructions: read them, then rebuild TensorFlow with care.",
            b"model.h:10] a C header",
            b"see port.cc:153] there",
            ABSL.replace(b"I0000", b"  I0000"),
        ],
    )
    def test_errors_warnings_and_user_lines_are_not_folded(self, line: bytes) -> None:
        assert shown(ABSL + b"\nx\n" + line + b"\nx\n") == [b"x", line, b"x"]

    @pytest.mark.parametrize("line", [line for line in CHATTER.read_bytes().splitlines() if line[4:5] == b"0"])
    def test_a_folded_message_is_shown_if_its_level_is_error(self, line: bytes) -> None:
        if b"cuInit" not in line:
            assert shown(error(line) + b"\n") == [error(line)]

    def test_only_continuation_lines_of_a_folded_message_are_folded(self) -> None:
        waiting = b"I0000 00:00:1795226239.734979   29711 coordination_service.cc:505] Example stragglers:\n"
        missing = b"/job:worker/replica:0/task:1\n"

        assert shown(waiting + missing + missing + b"user\n" + missing) == [b"user", missing.strip()]

    def test_folded_lines_are_counted_the_same_if_fed_byte_by_byte(self) -> None:
        data = CHATTER.read_bytes()
        lines = LogLines()

        for byte in data:
            lines.feed(bytes([byte]))

        assert lines.folded == data.count(b"\n")


CONFIGURATION = """\
I0000 00:00:1795275094.739102    8195 eager_service_impl.cc:355] SessionOptions: goo.gle/debugproto\x20\x20
device_count {
  key: "CPU"
  value: 1
}
allow_soft_placement: true
experimental {
  collective_group_leader: "/job:ps/replica:0/task:0"
}

"""


@pytest.mark.parametrize("mark", ["proto", "str", "only"])  # TensorFlow picks one at random
def test_a_tensorflow_session_configuration_is_folded_but_similar_user_lines_are_not(mark: str) -> None:
    configuration = CONFIGURATION.replace("debugproto", f"debug{mark}").encode()
    log = LogLines()
    above = b"I0000 00:00:1795275094.739102    8195 eager_service_impl.cc:355] something else\n"
    assert log.feed(above + b"loss: 0.5\n}\n") == b"loss: 0.5\n}\n"
    log = LogLines()
    assert log.feed(configuration + b"ps:0 serves\nvalue: 1\n") == b"ps:0 serves\nvalue: 1\n"
    assert log.folded == configuration.count(b"\n")


class TestTracebacks:
    """The first task's traceback is shown; the others are consequences of its failure."""

    TRACEBACK = (
        b"Traceback (most recent call last):\n"
        b'  File "train.py", line 8, in <module>\n'
        b"    step()\n"
        b"ValueError: no label\n"
    )
    CHAINED = (
        TRACEBACK
        + b"\nDuring handling of the above exception, another exception occurred:\n\n"
        + TRACEBACK.replace(b"ValueError", b"RuntimeError")
    )

    def both(self, first: bytes, second: bytes, later_s: float = 0.1) -> tuple[bytes, bytes, LogLines]:
        """What two logs show, and the second of them."""
        now = [0.0]
        tracebacks = Tracebacks(lambda: now[0])
        one, other = (LogLines(tracebacks=tracebacks) for _ in range(2))
        shown = one.feed(first)
        now[0] = later_s
        return shown, b"".join(other.feed(second[place : place + 7]) for place in range(0, len(second), 7)), other

    @pytest.mark.parametrize("text", [TRACEBACK, CHAINED], ids=["one", "chained"])
    def test_the_traceback_of_a_second_task_is_folded_and_counted(self, text: bytes) -> None:
        one, other, lines = self.both(text, b"before\n" + text + b"after\n")
        assert one == text
        assert other == b"before\nafter\n"
        assert lines.folded == lines.folded_traceback == text.count(b"\n")

    def test_all_tracebacks_of_one_task_are_shown(self) -> None:
        lines = LogLines(tracebacks=Tracebacks())
        assert lines.feed(self.CHAINED + self.TRACEBACK) == self.CHAINED + self.TRACEBACK

    def test_the_traceback_of_a_much_later_failure_is_shown(self) -> None:
        assert self.both(self.TRACEBACK, self.TRACEBACK, 1000.0)[1] == self.TRACEBACK

    def test_lines_that_tensorflow_appends_to_a_folded_traceback_are_folded(self) -> None:
        more = b"Additional GRPC error information from remote target /job:worker\n\t [[{{node Reduce}}]]\nnext\n"
        assert self.both(self.TRACEBACK, self.TRACEBACK + more)[1] == b"next\n"

    def test_tracebacks_of_all_tasks_are_shown_if_folding_is_off(self) -> None:
        tracebacks = Tracebacks()
        for _ in range(2):
            assert LogLines(fold=False, tracebacks=tracebacks).feed(self.TRACEBACK) == self.TRACEBACK
