"""A name of Keras 2 in a program is explained: real Keras says each of these sentences."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from launcher.verdict.known_failures import find_known
from launcher.verdict.removed_names import known_names

COVERS = ("launcher/verdict/removed_names.py", "launcher/verdict/known_failures.py")

MODEL = "keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])"
STATEMENTS = {
    "ImageDataGenerator": "keras.preprocessing.image.ImageDataGenerator()",
    "Tokenizer": "from keras.preprocessing import Tokenizer",
    "text": "from tensorflow.keras.preprocessing.text import Tokenizer\nfrom keras.preprocessing.text import Tokenizer",
    "experimental": "keras.utils.experimental.DatasetCreator(None)",
    "CuDNNLSTM": "from keras.layers import CuDNNLSTM",
    "CuDNNGRU": "tf.keras.layers.CuDNNGRU(1)",
    "ThresholdedReLU": "keras.layers.ThresholdedReLU()",
    "Reduction": "keras.losses.Reduction.SUM",
    "multi_gpu_model": "from keras.utils import multi_gpu_model",
    "get_session": "keras.backend.get_session()",
    "set_session": "keras.backend.set_session(None)",
    "learning_phase": "keras.backend.learning_phase()",
    "set_learning_phase": "keras.backend.set_learning_phase(1)",
    "int_shape": "keras.backend.int_shape(1)",
    "np_utils": "from keras.utils import np_utils",
    "scikit_learn": "from keras.wrappers.scikit_learn import KerasClassifier",
    "estimator": "tf.keras.estimator.model_to_estimator(None)",
    "reset_states": "keras.metrics.Mean().reset_states()",
    "fit_generator": f"{MODEL}.fit_generator(None)",
    "evaluate_generator": f"{MODEL}.evaluate_generator(None)",
    "predict_generator": f"{MODEL}.predict_generator(None)",
    "predict_classes": f"{MODEL}.predict_classes(None)",
    "predict_proba": f"{MODEL}.predict_proba(None)",
    "lr": "keras.optimizers.SGD(lr=0.1)",
    "period": "keras.callbacks.ModelCheckpoint('a.keras', period=2)",
    "write_grads": "keras.callbacks.TensorBoard(write_grads=True)",
    "batch_input_shape": "keras.layers.Dense(1, batch_input_shape=(2, 3))",
}
PROGRAM = """
import json, sys
import keras, tensorflow as tf
said = {}
for name, statement in json.loads(sys.argv[1]).items():
    try:
        exec(statement)
    except Exception as error:
        said[name] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""


@pytest.mark.slow
@pytest.mark.tensorflow
def test_each_name_is_explained_when_keras_says_that_it_has_none() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(STATEMENTS)], capture_output=True, text=True, check=True
    )
    said = json.loads(done.stdout.splitlines()[-1])
    explained = {}
    for name, text in said.items():
        found = find_known(text.splitlines())
        explained[name] = found.hint if found is not None else text
    assert {name for name, hint in explained.items() if f"Keras 3 has no `{name}`: " not in hint} == set(), explained
    assert said.keys() == STATEMENTS.keys()


def test_each_name_is_in_a_statement_here() -> None:
    assert [*STATEMENTS] == [hint.split("`")[1] for _, _, hint in known_names()]


@pytest.mark.parametrize(
    "text",
    [
        "AttributeError: module 'train' has no attribute 'text'",
        "AttributeError: 'Config' object has no attribute 'lr'",
        "ModuleNotFoundError: No module named 'my.experimental'",
        "TypeError: run() got an unexpected keyword argument 'text'",
    ],
)
def test_names_of_a_program_itself_are_not(text: str) -> None:
    found = find_known([text])
    assert found is None or "Keras 3" not in found.hint
