"""One small Ray for the whole suite, started only if a feed needs it: that of the tests of ingest, whichever come first."""

from tests.ingest.conftest import ray_cluster

__all__ = ["ray_cluster"]
