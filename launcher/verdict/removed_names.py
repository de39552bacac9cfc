"""Names of Keras 2 that Keras 3 no longer has, and what replaces them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

_IN_MODULES = {
    "ImageDataGenerator": "use keras.utils.image_dataset_from_directory and preprocessing layers",
    "Tokenizer": "use keras.layers.TextVectorization",
    "text": "use keras.layers.TextVectorization",
    "experimental": "its names have moved to the module above it, and DatasetCreator is replaced by tf.data.Dataset",
    "CuDNNLSTM": "use keras.layers.LSTM, which uses cuDNN by itself",
    "CuDNNGRU": "use keras.layers.GRU, which uses cuDNN by itself",
    "ThresholdedReLU": "use keras.layers.ReLU with a threshold",
    "Reduction": 'write the reduction as a text, as in reduction="sum"',
    "multi_gpu_model": "use tf.distribute.MirroredStrategy",
    "get_session": "leave it out, or use tf.compat.v1",
    "set_session": "leave it out, or use tf.compat.v1",
    "learning_phase": "call the model with training=…",
    "set_learning_phase": "call the model with training=…",
    "int_shape": "use the shape of the tensor",
    "np_utils": "use keras.utils.to_categorical",
    "scikit_learn": "use the package scikeras",
    "estimator": "train a Keras model with fit",
}
_OF_OBJECTS = {
    "reset_states": "use reset_state of a metric or of a recurrent layer",
    "fit_generator": "use fit",
    "evaluate_generator": "use evaluate",
    "predict_generator": "use predict",
    "predict_classes": "use predict, and take the most probable class",
    "predict_proba": "use predict",
}
_OF_CALLS = {
    "lr": "use learning_rate",
    "period": "use save_freq",
    "write_grads": "leave it out",
    "batch_input_shape": "use keras.Input with batch_shape",
}
_KERAS = r"'(?:\w+\.)*keras(?:\.\w+)*"
_NO_ATTRIBUTE = rf"module {_KERAS}' has no attribute '{{name}}'"
_NO_IMPORT = rf"cannot import name '{{name}}' from {_KERAS}'"
_NO_MODULE = rf"No module named {_KERAS}\.{{name}}'"
_KINDS: tuple[tuple[Mapping[str, str], str], ...] = (
    (_IN_MODULES, f"{_NO_ATTRIBUTE}|{_NO_IMPORT}|{_NO_MODULE}"),
    (_OF_OBJECTS, r"object has no attribute '{name}'"),
    (_OF_CALLS, r"(?:not recognized|passed to \w+): \{{'{name}'|unexpected keyword argument '{name}'"),
)
"""The names, and the message of an exception about a missing one."""


def known_names() -> Iterator[tuple[str, str, str]]:
    """Yields a pattern, a failure's class and a hint for each name."""
    for names, pattern in _KINDS:
        for name, replacement in names.items():
            hint = (
                f"Keras 3 has no `{name}`: {replacement}; or keep Keras 2: install tf_keras, set TF_USE_LEGACY_KERAS=1"
            )
            yield pattern.format(name=name), "task-failed", hint
