"""`python -m flows` is `penstock`, for places without the installed command."""

from flows.cli import main

if __name__ == "__main__":
    main()
