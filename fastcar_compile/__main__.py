"""`python -m fastcar_compile`: the `fastcar` command."""

from fastcar_compile.cli import main

if __name__ == "__main__":
    main()
