"""The changes that a command line makes to a spec: single fields, and variables of all tasks."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.spec.models import ClusterSpec
from launcher.spec.settings import Setting, set_fields
from launcher.spec.variables import check_variables, name_of, set_variables
from worker_entry.protocol.frozen import dataclass


@dataclass(frozen=True)
class Changes:
    """Changes of a spec; defaults apply only where the spec has no value."""

    settings: tuple[Setting, ...] = ()
    """The changed fields; a later setting of the same field wins."""
    variables: tuple[str, ...] = ()
    """The changed variables, as for `-e`: NAME=VALUE, or NAME."""
    default_settings: tuple[Setting, ...] = ()
    default_variables: tuple[str, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """The variables that need not be set in distlaunch's environment if the spec takes them from there."""
        return frozenset(map(name_of, self.variables))

    def apply(self, spec: ClusterSpec, environ: Mapping[str, str], *, check: bool = True) -> ClusterSpec:
        """The changed spec.

        Args:
            spec: the spec.
            environ: distlaunch's environment.
            check: whether all variables that the spec takes from `environ` must be there.

        Raises:
            UsageError: the spec would not be valid, or a variable is missing.
        """
        spec = set_fields(spec, self.settings, defaults=self.default_settings)
        has = {*spec.env, *spec.env_from, *self.names}
        defaults = [text for text in self.default_variables if name_of(text) not in has]
        spec = set_variables(spec, [*defaults, *self.variables], environ)
        if check:
            check_variables(spec, environ)
        return spec
