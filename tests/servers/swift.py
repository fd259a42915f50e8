"""Which S3 server do the tests talk to? OpenStack Swift with its S3 interface: real processes, a real disk, real signatures.

It comes from the package index, needs no root, starts in about two seconds and listens on 127.0.0.1 only. The first use makes
an environment for it below `.cache/` in the checkout (or PENSTOCK_TEST_CACHE); later ones find it there.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import venv
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from tests import ROOT
from tests.runs.servers import free_ports

__all__ = ["SwiftServer", "UnavailableError", "die_with_parent", "install_swift", "store_client"]

REQUIREMENTS = Path(__file__).with_name("swift-requirements.txt")
INSTALL_TIMEOUT_S = 300
START_TIMEOUT_S = 180
STORES = ("account", "container", "object")

_RING = Template("""
[swift-hash]
swift_hash_path_suffix = penstock-tests
[storage-policy:0]
name = single
default = yes
""")

_STORE = Template("""
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = $port
workers = 0
swift_dir = $directory
devices = $directory/disks
mount_check = false
fallocate_reserve = 0
disable_fallocate = true
log_level = WARNING
[pipeline:main]
pipeline = $kind-server
[app:$kind-server]
use = egg:swift#$kind
recon_cache_path = $directory/recon
""")

# listing_formats and bulk serve the S3 verbs ListObjects and DeleteObjects, slo the multipart uploads, copy CopyObject.
_PROXY = Template("""
[DEFAULT]
bind_ip = $address
bind_port = $port
workers = 0
swift_dir = $directory
log_level = WARNING
[pipeline:main]
pipeline = catch_errors gatekeeper healthcheck cache listing_formats bulk s3api tempauth
   copy slo dlo versioned_writes symlink proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:gatekeeper]
use = egg:swift#gatekeeper
[filter:healthcheck]
use = egg:swift#healthcheck
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:$nobody
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:bulk]
use = egg:swift#bulk
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = $secret .admin
[filter:copy]
use = egg:swift#copy
[filter:slo]
use = egg:swift#slo
[filter:dlo]
use = egg:swift#dlo
[filter:versioned_writes]
use = egg:swift#versioned_writes
allow_object_versioning = true
[filter:symlink]
use = egg:swift#symlink
""")

# What swift-ring-builder does in nine processes: create, add and rebalance for each kind of store.
_RINGS = """
import sys
from swift.common.ring import RingBuilder

for kind, port in zip(sys.argv[1::2], map(int, sys.argv[2::2])):
    builder = RingBuilder(2, 1, 0)
    here = {"ip": "127.0.0.1", "port": port, "replication_ip": "127.0.0.1", "replication_port": port}
    builder.add_dev({**here, "region": 1, "zone": 1, "device": "one", "weight": 1.0, "meta": ""})
    builder.rebalance()
    builder.get_ring().save(f"{kind}.ring.gz")
"""


class UnavailableError(Exception):
    """The server cannot be installed on this machine; the message says why. Tests are skipped for this reason alone."""


def install_swift() -> Path:
    """Return the folder of Swift's programs, installing it first if need be. Several test runs may ask at once.

    Raises:
        UnavailableError: pip cannot get it.
    """
    cache = Path(os.environ.get("PENSTOCK_TEST_CACHE") or ROOT / ".cache")
    cache.mkdir(parents=True, exist_ok=True)
    version = hashlib.blake2b(REQUIREMENTS.read_bytes() + sys.version.encode(), digest_size=6).hexdigest()
    home = cache / f"swift-{version}"
    with (cache / "swift.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (home / "ready").exists():
            return home / "bin"
        shutil.rmtree(home, ignore_errors=True)
        try:
            venv.create(home, with_pip=True)
            subprocess.run(
                [home / "bin" / "pip", "install", "-qq", "--disable-pip-version-check", "-r", REQUIREMENTS],
                check=True,
                capture_output=True,
                text=True,
                timeout=INSTALL_TIMEOUT_S,
            )
        except (subprocess.SubprocessError, OSError) as error:
            said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
            raise UnavailableError(f"OpenStack Swift cannot be installed: {said[-1] if said else error}") from error
        (home / "ready").touch()
    return home / "bin"


def store_client(settings: Mapping[str, str]) -> Any:
    """A client of the store that `settings` name, as a pipeline file does under `stores`, whatever the environment says."""
    import boto3

    key, secret = (os.environ[f"{settings['env_prefix']}_{name}"] for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"))
    return boto3.session.Session().client(
        "s3",
        endpoint_url=settings["endpoint"],
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        region_name=settings["region"],
    )


class SwiftServer:
    """One S3 endpoint with its state in `directory`. The data survive `kill` and `stop`; `start` brings them back.

    Args:
        directory: an empty or absent folder.
        programs: where Swift's programs are.
        address: where it listens; not the machine's own, for it knows one secret that everybody can read.
        secret_key: the one it knows.
    """

    access_key = "test:tester"
    region = "us-east-1"

    def __init__(
        self, directory: Path, programs: Path, address: str = "127.0.0.1", secret_key: str = "penstock-tests-only"
    ) -> None:
        self.directory, self.address, self.secret_key = directory, address, secret_key
        self._programs = programs
        self._ports = dict(zip(("proxy", "nobody", *STORES), free_ports(2 + len(STORES)), strict=True))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._write_configuration()

    @property
    def endpoint(self) -> str:
        """The URL for AWS_ENDPOINT_URL."""
        return f"http://{self.address}:{self._ports['proxy']}"

    @property
    def environment(self) -> Mapping[str, str]:
        """What a client needs, and what keeps a developer's own AWS settings out."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    @functools.cached_property
    def client(self) -> Any:
        """A client of boto3, which takes a tenth of a second to make."""
        import boto3

        return boto3.session.Session(self.access_key, self.secret_key, region_name=self.region).client(
            "s3", endpoint_url=self.endpoint
        )

    def start(self) -> None:
        """Start what does not run, and wait until it answers.

        Raises:
            RuntimeError: a process ends at once, or none answers in time; the message holds the end of its log.
        """
        for kind in (*STORES, "proxy"):
            if kind not in self._processes or self._processes[kind].poll() is not None:
                self._spawn(kind)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            dead = [kind for kind, process in self._processes.items() if process.poll() is not None]
            if dead or time.monotonic() > deadline:
                kind = dead[0] if dead else "proxy"
                log = (self.directory / f"{kind}.log").read_text(errors="replace")[-500:]
                self.stop()
                raise RuntimeError(f"Swift's {kind} server does not start: {log}")
            time.sleep(0.05)  # a server that listens tells nobody: it can only be called again

    def kill(self) -> None:
        """SIGKILL to all of it, as a power cut would; `start` brings it back with its data."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End every process, politely first."""
        self._end(signal.SIGTERM)

    def _end(self, signum: int) -> None:
        for process in self._processes.values():
            process.send_signal(signum)
        for process in self._processes.values():
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def _answers(self) -> bool:
        try:
            for kind in STORES:
                socket.create_connection(("127.0.0.1", self._ports[kind]), timeout=1).close()
            with urllib.request.urlopen(f"{self.endpoint}/healthcheck", timeout=2) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def _spawn(self, kind: str) -> None:
        with (self.directory / f"{kind}.log").open("ab") as log:
            self._processes[kind] = subprocess.Popen(
                [
                    self._programs / "python",
                    "-W",
                    "ignore",
                    self._programs / f"swift-{kind}-server",
                    self.directory / f"{kind}.conf",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )

    def _write_configuration(self) -> None:
        for folder in ("disks/one", "recon"):
            (self.directory / folder).mkdir(parents=True, exist_ok=True)
        (self.directory / "swift.conf").write_text(_RING.substitute())
        words = {"directory": self.directory, "secret": self.secret_key, "nobody": self._ports["nobody"]}
        words |= {"address": self.address}
        (self.directory / "proxy.conf").write_text(_PROXY.substitute(words, port=self._ports["proxy"]))
        for kind in STORES:
            (self.directory / f"{kind}.conf").write_text(_STORE.substitute(words, kind=kind, port=self._ports[kind]))
        command: list[str | Path] = [self._programs / "python", "-W", "ignore", "-c", _RINGS]
        command += [word for kind in STORES for word in (kind, str(self._ports[kind]))]
        done = subprocess.run(command, cwd=self.directory, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"Swift's rings cannot be made: {done.stdout} {done.stderr}")


def die_with_parent() -> None:
    """On Linux, end this process when the test run dies, even by SIGKILL."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
