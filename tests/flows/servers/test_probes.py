"""Are the addresses in the environment usable?"""

from __future__ import annotations

import socket

from penstock.flows.servers.probes import ray_address, ray_refusal


def test_ray_address_local_means_embedded() -> None:
    assert [ray_address({"RAY_ADDRESS": value}) for value in ("", "local", "auto", "head:6379")] == [
        None,
        None,
        "auto",
        "head:6379",
    ]
    assert ray_address({}) is None


def test_ray_address_is_refused_until_it_listens() -> None:
    with socket.socket() as cluster:
        cluster.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{cluster.getsockname()[1]}"
        assert "refused" in (ray_refusal(address) or "")
        cluster.listen()
        assert ray_refusal(address) is None
        assert "is an address of Ray Client" in (ray_refusal(f"ray://{address}") or "")
    assert ray_refusal("head-node") == "does not answer: it has no port"
    assert ray_refusal("auto") is None
