"""Statements that Keras 3 refuses."""

from __future__ import annotations

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
