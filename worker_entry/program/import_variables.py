"""The environment variables that matter when a program imports its framework, and how the program changes them.

This module is separate from `environment`, which needs Python's parser to find changes in the program's source: every
agent that runs tasks imports this module.
"""

from __future__ import annotations

import re
from typing import Optional

from worker_entry.protocol import environment
from worker_entry.protocol.frozen import dataclass, field

LATE = (
    *("TF_CONFIG", "TF_GRPC_REUSE_PORT", "CUDA_VISIBLE_DEVICES", "TF_FORCE_GPU_ALLOW_GROWTH"),
    *("no_grpc_proxy", "GRPC_FAIL_FAST"),
    *environment.OF_JAX,
    *("KERAS_DISTRIBUTION_JOB_ADDRESSES", "KERAS_DISTRIBUTION_NUM_PROCESSES", "KERAS_DISTRIBUTION_PROCESS_ID"),
)
"""Variables that no library reads at import; `tests/jax/test_forkserver.py` checks those of JAX and Keras."""
READ = re.compile(
    r"(TF|XLA|TPU|LIBTPU|PJRT|JAX|KERAS|AUTOGRAPH|ONEDNN|DNNL|CUDA|ROCM|HIP|GRPC|ABSL|GLOG|OMP|KMP|MKL|OPENBLAS|NPY|NUMPY|LD|MPL)"
    r"(_|$)|MPLBACKEND$|PROTOCOL_BUFFERS_"
)
"""Variables that an import may read; all other variables do not affect an import."""


@dataclass(frozen=True)
class ProgramEnv:
    """The changes that the program's source shows.

    `changes`: the values of variables when the framework is imported, None for a removed variable. `unclear`: variables
    that an import reads and whose values are known only when the program runs, with the lines that set them.
    """

    changes: dict[str, Optional[str]] = field(default_factory=dict)
    unclear: dict[str, str] = field(default_factory=dict)

    def over(self, env: dict[str, str]) -> dict[str, str]:
        """Returns the environment `env` with the program's changes."""
        merged = {**env, **{name: value for name, value in self.changes.items() if value is not None}}
        return {name: value for name, value in merged.items() if self.changes.get(name, "") is not None}
