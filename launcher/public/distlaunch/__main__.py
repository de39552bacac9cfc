"""`python -m distlaunch`: the `distlaunch` command."""

from launcher.__main__ import main

if __name__ == "__main__":
    main()
