"""Operating system services: processes, ports, cgroups, clocks. Written for Linux, with portable fall-backs."""
