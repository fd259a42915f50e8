"""`python -m penstock` is `penstock`, for places without the installed command."""

from penstock.flows.cli import main

if __name__ == "__main__":
    main()
