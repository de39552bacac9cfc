"""The options of the command line that set a field of a spec; each is an annotation of its field.

They stand apart from the models, whose import takes three times as long as all of `--help`.
"""

from __future__ import annotations

from typing import NamedTuple


class FieldOption(NamedTuple):
    """An option that sets the field that it annotates. The field's type checks the value, as in a spec file."""

    name: str
    """The name on the command line, without dashes."""
    section: str
    """The section of the help."""
    help: str
    metavar: str = ""
    """The name of the value; without one, the option is a flag, which sets the field to true."""
    choices: tuple[str, ...] = ()
    """All values, if there are few."""
    is_duration: bool = False
    """Whether the value is a duration such as `15m`; the field has seconds."""
    default_text: str = ""
    """The default as the help shows it."""
    bare: str = ""
    """What the option means without a value, in a form that the value may have; empty: it needs a value."""


PYTHON = FieldOption(
    "python", "Program", "Use this Python on nodes whose spec names none.", metavar="PATH"
)  # its default depends on the node
STRATEGY = FieldOption(
    "strategy",
    "Cluster",
    "Use this tf.distribute strategy, like mirrored.",
    metavar="NAME",
    choices=("one_device", "mirrored", "central_storage", "multi_worker_mirrored", "parameter_server", "tpu"),
)
FRAMEWORK = FieldOption(
    "framework",
    "Cluster",
    "Train with tensorflow (default), torch or jax.",
    metavar="NAME",
    choices=("tensorflow", "torch", "jax"),
)
DEVICES = FieldOption("devices", "Cluster", "Split a CPU into N devices if there is no GPU.", metavar="N")
GPUS_PER_WORKER = FieldOption(
    "gpus-per-worker", "Cluster", "Give each worker K GPUs.", metavar="K", default_text="an equal share"
)
WAIT_GPUS = FieldOption(
    "wait-gpus",
    "Cluster",
    "Wait until the GPUs are free, for TIME at most.",
    metavar="[TIME]",
    is_duration=True,
    bare="0s",
)
MAX_RESTARTS = FieldOption("max-restarts", "Program", "Restart after a failure, up to N times (0).", metavar="N")
KEEP_WARM = FieldOption(
    "keep-warm", "Program", "Keep the framework imported for AGE, like 15m.", metavar="AGE", is_duration=True
)
REPORT = FieldOption("report", "Output", "Write report.html when the run ends.")
TENSORBOARD = FieldOption("tensorboard", "Output", "Run TensorBoard on the chief's node.")
