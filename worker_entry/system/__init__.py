"""What is asked of the operating system: processes, ports, cgroups, clocks. Linux first, with portable fall-backs."""
