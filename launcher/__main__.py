"""`python -m launcher`: the same as the `distlaunch` command."""

from launcher.cli.main import main

if __name__ == "__main__":
    main()
