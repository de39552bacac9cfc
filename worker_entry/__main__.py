"""`python …/worker_entry (agent | node | attach | clean | profile | forkserver | task FILE | run …)`: a path, or by -m.

An `agent` ends with its stdin; a `node` is an agent that outlives its connection, to which `attach` comes back.
A `forkserver` imports TensorFlow and forks tasks. `clean` stops what is left of runs whose controller is gone.
`profile` asks the workers of a cluster what they do.
"""

import os
import sys


def main() -> None:
    if not __package__:
        # Started as a path: Python put the package itself first on sys.path; what it needs is the folder around it.
        sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    verb, rest = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if verb in ("agent", "node"):
        from worker_entry.agent import guardian

        status = guardian.main(outlives_connection=verb == "node")
        sys.stderr.flush()
        os._exit(status)  # nothing is left to be tidied up, for which an interpreter takes a tenth of an agent's CPU
    if verb == "attach":
        from worker_entry.agent import reattachment

        sys.exit(reattachment.hand_over())
    if verb == "clean":
        from worker_entry.agent import cleanup

        sys.exit(cleanup.main())
    if verb == "profile":
        from worker_entry.task import profiling

        profiling.main()
        return
    # Imported while the folder is on sys.path; the user's program then gets a path without it.
    from worker_entry.task import runner

    if verb == "forkserver":
        from worker_entry.task import forkserver
    if not (__package__ and getattr(sys.flags, "safe_path", False)):  # -P and `-m`: Python has put nothing there
        del sys.path[0]
    if verb == "task":
        runner.main(rest)
    elif verb == "forkserver":
        order = forkserver.serve()
        if order is not None:
            runner.run(order)
    elif verb == "run":
        runner.main_by_hand(rest)
    else:
        sys.exit("usage: python -m worker_entry (agent | task FILE | run (SCRIPT | -m MODULE | -- COMMAND) [ARGS…])")


if __name__ == "__main__":
    main()
