"""The flow that wires the stages, and the `penstock` command line."""
