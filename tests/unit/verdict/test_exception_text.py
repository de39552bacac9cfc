"""The headline of an exception is the sentence that names the failure, wherever the message contains it."""

from __future__ import annotations

import pytest

from launcher.verdict.exception_text import LENGTH, NODE_LENGTH, find_sentence

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
def test_the_headline_of_an_exception_names_the_failure(message: str, sentence: str) -> None:
    assert find_sentence(message) == sentence


def test_a_preferred_line_becomes_the_exception_headline() -> None:
    message = graph_error("2 root error(s) found.", "  (0) UNKNOWN:  Bad", "  (1) ABORTED:  Socket closed [Op:F]")
    assert find_sentence(message, ["Socket closed"]) == "Socket closed"


def test_a_long_name_of_a_node_in_a_graph_is_shortened_to_its_first_and_last_part() -> None:
    def place(node: str) -> str:
        return find_sentence(f"the sizes differ\n\t [[{{{{node {node}}}}}]] [Op:__inference_f_1]")

    parts = "a" * (NODE_LENGTH // 2)
    assert place("model/dense/MatMul") == "the sizes differ (node model/dense/MatMul)"
    assert place(f"model/{parts}/{parts}/MatMul") == "the sizes differ (node model/…/MatMul)"
    assert place(f"{parts}{parts}/MatMul") == f"the sizes differ (node {parts}{parts}/MatMul)"


def test_a_long_exception_headline_is_cut() -> None:
    assert find_sentence("x" * 1000) == "x" * LENGTH
