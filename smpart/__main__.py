"""``python -m smpart`` is the command ``smpart``."""

from smpart.cli import main

if __name__ == "__main__":
    main()
