"""The headline of an exception is the sentence that names the failure, wherever the message contains it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

from launcher.verdict.exception_text import find_sentence
from tests.harness.places import PROGRAMS

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


def test_the_headline_is_found_in_real_exceptions_of_tensorflow_and_keras() -> None:
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
