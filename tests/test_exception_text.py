"""The headline of an exception is the sentence that names the failure, wherever the message contains it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from launcher.verdict.exception_text import LENGTH, find_sentence
from tests.conftest import PROGRAMS

COVERS = ("launcher/verdict", "worker_entry/task/crash_record.py")

LABEL = r"Received a label value of 14 which is outside the valid range of \[0, 10\)\. .*"
REAL = {
    "bad label": LABEL + r" \(node compile_loss/…/SparseSoftmaxCrossEntropyWithLogits\)",
    "bad label on two replicas": LABEL + r" \(node (replica_1|compile_loss)/…/SparseSoftmaxCrossEntropyWithLogits\)",
    "bad index": r"indices\[\d,\d\] = 77 is not in \[0, 10\) \(node .*/GatherV2\)",
    "bad matmul": r"Matrix size-incompatible: In\[0\]: \[16,2\], In\[1\]: \[4,10\] \(node .*/MatMul\)",
    "out of memory": r"OOM when allocating tensor with shape\[4194304,16777216\] and type float on .*",
    "assertion": r"assertion failed: \[x is too large\].* \(node assert_less/Assert/AssertGuard/Assert\)",
    "autograph": r"NameError: name 'undefined' is not defined",
    "xla": r"Incompatible shapes: \[3\] vs\. \[4\] \(node add\)",
    "input shape": r"Input 0 .* is incompatible with the layer: .* \(None, 5\) \(in Sequential\.call\(\)\)",
    "bad image": r"Unknown image file format\. .* required\. \(node DecodeJpeg\)",
    "python in map": r"KeyError: 'bad sample'",
    "missing file": r"/absent\.tfrecord; No such file or directory",
    "eager": r"Matrix size-incompatible: In\[0\]: \[2,3\], In\[1\]: \[4,5\]",
}


@pytest.mark.tensorflow
def test_the_sentence_is_found_in_real_messages_of_tensorflow_and_keras() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "fail_in_graph.py")],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    messages: dict[str, str] = json.loads(done.stdout)
    found = {name: find_sentence(message) for name, message in messages.items()}
    assert found.keys() == REAL.keys()
    wrong = {name: found[name] for name, expected in REAL.items() if not re.fullmatch(expected, found[name])}
    assert wrong == {}


FRAMES = '  File "a.py", line 3, in f\n    g(x)\n\n  File "b.py", line 4, in g\n    h(x)'


def graph_error(*rest: str, trace: str = "<stack traces unavailable>") -> str:
    return "\n".join(
        ["Graph execution error:", "", "Detected at node a/b defined at (most recent call last):", trace, *rest]
    )


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ("", ""),
        ("shapes (3,4) and (5,) not aligned", "shapes (3,4) and (5,) not aligned"),
        ("one\ntwo", "one"),
        ("\n\none\n", "one"),
        ("in the file:\n\n  line 3\n  line 4", "in the file: line 3"),
        ("\x1b[1mbold\x1b[0m", "bold"),
        ("in user code:\n\nwithout frames", "without frames"),
        ("Graph execution error:", ""),
        (graph_error("Bad\n\t [[{{node a/b}}]] [Op:__inference_f_1]"), "Bad (node a/b)"),
        (graph_error("Bad", "\t [[{{node a/b}}]]", "\t [[IteratorGetNext]] [Op:__inference_f_1]"), "Bad (node a/b)"),
        (graph_error("Bad", "\t [[{{node x/IteratorGetNext_2}}]]"), "Bad"),
        (graph_error("Bad", trace=FRAMES), "Bad"),
        # Up to TensorFlow 2.14.
        (graph_error("Node: 'a/b'", "Bad", "\t [[{{node a/b}}]]", trace=FRAMES), "Bad (node a/b)"),
        (
            graph_error(
                "3 root error(s) found.",
                "  (0) CANCELLED:  Function was cancelled before it was started",
                "\t [[{{node c}}]]",
                "  (1) INVALID_ARGUMENT:  Bad",
                "\t [[{{node d}}]]",
                "  (2) INVALID_ARGUMENT:  Worse",
                "0 successful operations.",
            ),
            "Bad (node d)",
        ),
        (
            "Exception encountered when calling L.call().\n\n\x1b[1mBad for '{{node l/MatMul}} = MatMul'.\x1b[0m\n\nx",
            "Bad for 'l/MatMul = MatMul'. (in L.call())",
        ),
        ("{{function_node __wrapped__F_device_/job:worker/replica:0/task:1/device:CPU:0}} Bad [Op:F] name: ", "Bad"),
    ],
)
def test_the_sentence_that_matters_is_found(message: str, sentence: str) -> None:
    assert find_sentence(message) == sentence


def test_a_preferred_line_wins() -> None:
    message = graph_error("2 root error(s) found.", "  (0) UNKNOWN:  Bad", "  (1) ABORTED:  Socket closed [Op:F]")
    assert find_sentence(message, ["Socket closed"]) == "Socket closed"


def test_a_long_sentence_is_cut() -> None:
    assert find_sentence("x" * 1000) == "x" * LENGTH
