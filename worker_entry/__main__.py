"""`python …/worker_entry VERB` or `python -m worker_entry VERB`; only `run` is for users.

An `agent` ends with its stdin. A `node` is an agent that outlives its connection; `attach` gives it a new connection. A
`warm-agent` or `warm-node` may stay for the next run.
A `forkserver` imports TensorFlow and forks tasks. `clean` stops leftover processes of runs whose controller is gone.
`pod` runs a task in a Kubernetes pod, where there is no agent.
`profile` captures a profile of a cluster's workers; `speed` measures this node. `gpus` prints readings of the GPUs.
`outside` and `tunnel` serve an agent in a separate network namespace.
"""

import gc
import os
import sys


def main() -> None:
    if not __package__:
        # Python was started with a path, and puts the package itself first on sys.path; imports need the parent.
        sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    verb, rest = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    may_stay, kind = verb.startswith("warm-"), verb.removeprefix("warm-")
    if kind in ("agent", "node"):
        gc.set_threshold(10_000)  # imported objects stay: scanning them again takes 1/20 of the start
        from worker_entry.agent import guardian

        status = guardian.main(outlives_connection=kind == "node", may_stay=may_stay)
        sys.stderr.flush()
        os._exit(
            status
        )  # the interpreter's shutdown would cost a tenth of an agent's CPU time, and nothing is left to do
    if verb == "attach":
        from worker_entry.agent.connection import handover

        sys.exit(handover.hand_over())
    if verb == "clean":
        from worker_entry.agent import cleanup

        sys.exit(cleanup.main())
    if verb == "profile":
        from worker_entry.task import profiling

        profiling.main()
        return
    if verb == "speed":
        from worker_entry.task import speed

        speed.main(rest[0])
        return
    if verb == "outside":
        from worker_entry.agent.network import outer_process

        outer_process.serve()
        return
    if verb == "tunnel":
        from worker_entry.agent.network import tunnel_process

        tunnel_process.serve()
        return
    if verb == "gpus":
        from worker_entry.agent.gpus import reader

        reader.main(float(rest[0]))
        return
    if verb == "pod":
        from worker_entry.pod import entry

        sys.exit(entry.main(rest))
    # Imported while the parent is on sys.path; the user's program gets sys.path without the parent.
    from worker_entry.task import runner

    if verb == "forkserver":
        from worker_entry.task import forkserver
    if not (__package__ and getattr(sys.flags, "safe_path", False)):  # with -P and -m, Python adds no entry
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
