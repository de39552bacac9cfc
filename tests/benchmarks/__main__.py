"""`python -m tests.benchmarks [NAME…] [--runs N] [--document]`: runs benchmarks, and prints a table for each."""

import argparse
from collections.abc import Callable, Iterable, Mapping

from tests.benchmarks import (
    connection_logs,
    fan_out,
    faults,
    guards,
    healthy,
    kubernetes,
    list_time,
    live_view,
    log_index,
    log_throughput,
    overhead,
    page,
    read_logs,
    restart_time,
    resume,
    sampling,
    short_commands,
    simulated_nodes,
    slurm,
    speed_check,
    ssh_logs,
    start_time,
    step_time,
    stop_time,
    stragglers,
    warm_start,
)
from tests.benchmarks.document import write_row
from tests.benchmarks.pairs import HEADING, Pair
from tests.benchmarks.verdicts import benchmark as verdicts

BENCHMARKS: Mapping[str, Callable[[int], Iterable[Pair] | None]] = {
    "fanout": fan_out.measure,
    "faults": faults.measure,
    "guards": guards.measure,
    "healthy": healthy.measure,
    "kubernetes": kubernetes.measure,
    "live": live_view.measure,
    "ls": list_time.measure,
    "log-index": log_index.measure,
    "logs": log_throughput.measure,
    "overhead": overhead.measure,
    "page": page.measure,
    "read-logs": read_logs.measure,
    "restart": restart_time.measure,
    "resume": resume.measure,
    "sampling": sampling.measure,
    "short": short_commands.measure,
    "simulated-nodes": simulated_nodes.measure,
    "slurm": slurm.measure,
    "speed-check": speed_check.measure,
    "ssh-logs": ssh_logs.measure,
    "start": start_time.measure,
    "step": step_time.measure,
    "stop": stop_time.measure,
    "stragglers": stragglers.measure,
    "verdicts": verdicts.measure,
    "warm": warm_start.measure,
    "connection-logs": connection_logs.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(BENCHMARKS)}")
    parser.add_argument("--runs", type=int, default=5, help="runs per side; default: 5")
    parser.add_argument("--document", action="store_true", help="write the rows of the table in tests/README.md")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - BENCHMARKS.keys()
    if unknown:
        parser.error(f"unknown benchmark {', '.join(sorted(unknown))}")
    for name in arguments.names or BENCHMARKS:
        for pair in BENCHMARKS[name](arguments.runs) or ():
            print(pair.render(), flush=True)
            if arguments.document and (row := pair.render_row()):
                write_row(HEADING, row)


if __name__ == "__main__":
    main()
