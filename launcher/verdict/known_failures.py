"""Known failures, recognised by an exception or the last lines of a log, each with its class and hint."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from launcher.verdict.removed_names import known_names
from worker_entry.protocol.collateral import OUT_OF_STEP
from worker_entry.protocol.frozen import dataclass


@dataclass(frozen=True)
class KnownFailure:
    """`pattern` is searched in each line, `reference` is the failure's class, and `hint` says what to do."""

    pattern: str
    """A regular expression, compiled when it is first searched: most commands search none."""
    reference: str
    hint: str


def find_known(texts: Iterable[str], ports: Collection[int] = ()) -> KnownFailure | None:
    """The first entry of the table that matches one of the texts.

    Args:
        texts: an exception with its message, or the lines of a log.
        ports: the cluster's ports; a program may find that another of its ports is taken.
    """
    texts = list(texts)
    if any(re.search(_TAKEN, text) and _names_port(text, ports) for text in texts):
        return _PORT_TAKEN
    return next((known for known in _KNOWN if any(re.search(known.pattern, text) for text in texts)), None)


def _names_port(text: str, ports: Collection[int]) -> bool:
    return "Could not start gRPC server" in text or any(re.search(rf"(?<!\d){port}(?!\d)", text) for port in ports)


_TAKEN = r"Could not start gRPC server|Only one usage of each socket address|[Aa]ddress already in use"
_PORT_TAKEN = KnownFailure(
    _TAKEN,
    "port-taken",
    "another process took the port; without `port:` in the spec, distlaunch holds a free port until it is used",
)
_SAME_CALLS = (
    "all workers must make the same calls (fit, evaluate, predict, save, …), with the same number of steps and "
    "the same shapes: do not put such a call under an `if` for one worker, and give all the same number of batches"
)

_KNOWN = tuple(
    KnownFailure(pattern, reference, hint)
    for pattern, reference, hint in (
        (
            OUT_OF_STEP.pattern,
            "out-of-step",
            _SAME_CALLS,
        ),
        (r"No space left on device", "disk-full", "free disk space on that node"),
        (
            r"^EOFError: EOF when reading a line",
            "task-failed",
            "only the chief reads stdin, from a pipe or a file: use `< FILE`, and `stdin: all` for all tasks",
        ),
        *known_names(),
        (
            r"Collectives are not yet implemented for CPU devices when compiling with XLA",
            "task-failed",
            "TensorFlow cannot compile the exchange between workers for CPUs: leave out jit_compile=True, or use GPUs",
        ),
        (
            r"SLURM_\w+ not found in environment",
            "task-failed",
            "build the strategy without SlurmClusterResolver: it then finds this cluster in TF_CONFIG",
        ),
        (
            r"No module named '(tensorflow|keras)'",
            "task-failed",
            "install TensorFlow for this Python, or name the one that has it with --python (`python:` in a spec)",
        ),
        (
            r"^ModuleNotFoundError: ",
            "task-failed",
            "install the module for the Python that the tasks use, or set PYTHONPATH",
        ),
        (
            r"Attempt to convert a value \(PerReplica|Invalid reduction dimension 0 for input with 0 dimensions",
            "version-mismatch",
            "model.fit of Keras 3 fails on several workers unless distlaunch patches it: set keras.patch to true",
        ),
        (
            r"need to pass this dataset to ClusterCoordinator\.create_per_worker_dataset",
            "task-failed",
            "model.fit of Keras 3 fails here unless patched: set keras.patch to true, or TF_USE_LEGACY_KERAS=1",
        ),
        (
            r"Collective ops must be configured at program startup",
            "task-failed",
            "create MultiWorkerMirroredStrategy before any other operation of TensorFlow",
        ),
        (
            r"Mixing different tf\.distribute\.Strategy objects|must only be passed a variable created in this tf",
            "task-failed",
            "create the model, with all of its layers, and its optimizer within `strategy.scope()`",
        ),
        (
            r"must be called before any JAX c(alls|omputations)",
            "task-failed",
            "call jax.distributed.initialize() first, before anything that uses a device",
        ),
        (
            r"passed to device_put is not the same on each process",
            "task-failed",
            "all processes must begin with the same values: call keras.utils.set_random_seed(SEED) before the model",
        ),
        (
            r"the data must be provided as a `tf\.data\.Dataset` instance",
            "task-failed",
            "Keras on JAX shares out other data only if it is patched: set keras.patch to true",
        ),
        (
            r"compiled using NumPy 1\.x cannot be run in|multiarray failed to import|numpy\.dtype size changed",
            "version-mismatch",
            "TensorFlow, or another module, was built for a different NumPy: install `numpy<2`, or newer builds",
        ),
        (
            r"Descriptors cannot be created directly",
            "version-mismatch",
            "protobuf is too new for this TensorFlow: install the version that TensorFlow requires",
        ),
        (
            r"Loaded runtime CuDNN library: \S+ but source was compiled with",
            "version-mismatch",
            "cuDNN is older than this TensorFlow requires: `pip install 'tensorflow[and-cuda]'` installs the right one",
        ),
        (
            r"CUDA driver version is insufficient for CUDA runtime version",
            "version-mismatch",
            "the node's NVIDIA driver is too old for this CUDA: update the driver",
        ),
        (
            r"no kernel image is available for execution on the device|cudaErrorNoKernelImageForDevice",
            "version-mismatch",
            "this TensorFlow was not built for this GPU: install a build that supports it",
        ),
        (
            r"undefined symbol: |GLIBC(?:XX)?_[\d.]+' not found",
            "version-mismatch",
            "libraries of different builds do not match: reinstall TensorFlow and its extensions in matching versions",
        ),
        (
            r"was compiled to use \S+ instructions, but these aren't available",
            "version-mismatch",
            "this TensorFlow was built for a newer processor than this node has: install another build",
        ),
        (
            r"Keras 3 only supports V3 `\.keras` files",
            "version-mismatch",
            "the file was saved by Keras 2: load it with tf_keras (TF_USE_LEGACY_KERAS=1), or save it with Keras 3",
        ),
        (
            r"unable to lock file, errno = 11|allow_missing_files was set to false and \S+ did not exist",
            "task-failed",
            "several workers save to one path: give each worker its own path, and keep the chief's",
        ),
        (
            r"Serialized cache key does not match|Failed to parse serialized \w+CompilationResult",
            "task-failed",
            "an entry of the compile cache is damaged: remove the folder that `cache` or TF_XLA_FLAGS names",
        ),
        (
            r"ResourceExhaustedError|OOM when allocating tensor|^MemoryError|RESOURCE_EXHAUSTED: |CUDA out of memory",
            "out-of-memory",
            "reduce the batch size, or use a device with more memory",
        ),
    )
)
"""Searched in this order."""
