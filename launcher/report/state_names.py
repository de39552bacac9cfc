"""The states of a run, in the words that every command shows."""

from __future__ import annotations

from typing import Literal

LiveState = Literal["connecting", "forming", "running", "restarting", "waiting", "stopping"]
Outcome = Literal["succeeded", "failed", "interrupted"]
StateName = Literal["pending", LiveState, Outcome]
"""`pending`: the Slurm job is queued or requeued."""
RunState = Literal[StateName, "lost", "ended"]
"""`lost`: the controller is gone and has not recorded an end. `ended`: an end is recorded, but no outcome."""
