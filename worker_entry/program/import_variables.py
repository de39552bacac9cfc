"""The variables with which a program imports TensorFlow: which of them matter, and how a program changes them.

Separate from `environment`, which finds changes in the program's source: every agent needs this module at its start.
"""

from __future__ import annotations

import re
from typing import Optional

from worker_entry.protocol.frozen import dataclass, field

LATE = ("TF_CONFIG", "CUDA_VISIBLE_DEVICES", "TF_FORCE_GPU_ALLOW_GROWTH", "no_grpc_proxy", "GRPC_FAIL_FAST")
"""Variables that no library reads when it is imported."""
READ = re.compile(
    r"(TF|XLA|TPU|KERAS|AUTOGRAPH|ONEDNN|DNNL|CUDA|ROCM|HIP|GRPC|ABSL|GLOG|OMP|KMP|MKL|OPENBLAS|NPY|NUMPY|LD|MPL)"
    r"(_|$)|MPLBACKEND$|PROTOCOL_BUFFERS_"
)
"""Variables that an import may read; a program may set all others as it likes."""


@dataclass(frozen=True)
class ProgramEnv:
    """What the program's source shows.

    `changes`: the values of variables when TensorFlow is imported, None for one that is removed. `unclear`: variables
    that an import reads and whose value is only known when the program runs, with the line that sets them.
    """

    changes: dict[str, Optional[str]] = field(default_factory=dict)
    unclear: dict[str, str] = field(default_factory=dict)

    def over(self, env: dict[str, str]) -> dict[str, str]:
        """The environment `env` with the program's changes."""
        merged = {**env, **{name: value for name, value in self.changes.items() if value is not None}}
        return {name: value for name, value in merged.items() if self.changes.get(name, "") is not None}
