"""What the command line says over what a spec says."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel

from launcher.spec import ClusterSpec

_Model = TypeVar("_Model", bound=BaseModel)


def override(
    spec: ClusterSpec,
    *,
    mend_keras: bool | None = None,
    max_restarts: int | None = None,
    stall_s: float | None = None,
    progress: bool | None = None,
    preload: bool | None = None,
    tensorboard: bool | str | None = None,
) -> ClusterSpec:
    """The spec with these values where they are given."""
    return _with(
        spec,
        keras=_with(spec.keras, mend=mend_keras),
        restart=_with(spec.restart, max_restarts=max_restarts),
        timeouts=_with(spec.timeouts, stall_s=stall_s),
        progress=progress,
        preload=preload,
        tensorboard=tensorboard,
    )


def _with(model: _Model, **values: Any) -> _Model:
    return model.model_copy(update={name: value for name, value in values.items() if value is not None})
