"""The libraries that a node imports before a program begins, by the framework of its spec."""

from __future__ import annotations

from collections.abc import Collection

from worker_entry.program.finding import find_imports
from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.values import Program


@dataclass(frozen=True)
class Libraries:
    """What is imported early for the programs of one framework.

    `name`: the framework, as its users know it. `packages`: a program that contains none of these words needs no early
    import. `always`: imported for every other program. `if_imported`: imported if the program names them in an import
    statement. A library comes after those that it imports.
    """

    name: str
    packages: tuple[str, ...]
    always: tuple[str, ...]
    if_imported: tuple[str, ...] = ()

    def find_modules(self, program: Program, cwd: str) -> list[str]:
        """The modules to import for this program, in this order."""
        found: Collection[str] = find_imports(program, cwd, self.if_imported) if self.if_imported else ()
        return [*self.always, *(each for each in self.if_imported if each in found)]


TENSORFLOW = Libraries("TensorFlow", ("tensorflow", "keras", "tf_keras"), ("tensorflow",))
JAX = Libraries("JAX", ("jax", "keras", "tensorflow"), ("jax",), ("keras", "tensorflow"))


def libraries_of(framework: str) -> Libraries:
    """The libraries of a spec's `framework`."""
    return JAX if framework == "jax" else TENSORFLOW
