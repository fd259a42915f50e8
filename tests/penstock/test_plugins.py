"""What does a registry of named things find, and what does it say where it does not?"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from penstock.errors import PreflightError, SpecError
from penstock.plugins import Plugins, needed, optional
from tests.plugin_package import install_package

OWN = {"counter": "collections:Counter", "deque": "collections:deque"}


def things(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> Plugins[type]:
    monkeypatch.setattr(sys, "path", [*map(str, folders), *sys.path])
    return Plugins("thing", "penstock.test_things", OWN)


@pytest.fixture(scope="module")
def extra(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a package is installed that adds `extra`."""
    source = "class Extra:\n    pass\n"
    return install_package(tmp_path_factory.mktemp("extra"), "penstock.test_things", 'extra = "acme_extra:Extra"', source)


def test_own_plug_in_is_imported_by_name() -> None:
    from collections import Counter

    found: Plugins[type] = Plugins("thing", "penstock.test_things", OWN)
    assert found.get("counter") is Counter
    assert found.names == ("counter", "deque")
    assert found.origin("counter") is None


def test_name_of_a_deleted_module_is_left_out() -> None:
    places = OWN | {"gone": "penstock.no_such_folder.thing:Thing", "lost": "penstock.no_such_module:Thing"}
    found: Plugins[type] = Plugins("thing", "penstock.test_things", places)
    assert found.names == ("counter", "deque")
    with pytest.raises(SpecError, match="no thing 'gone'; there are counter, deque"):
        found.get("gone")


def test_place_of_a_plug_in_is_imported_or_missed() -> None:
    from collections import Counter

    assert optional("collections:Counter") is needed("collections:Counter", "it") is Counter
    assert optional("penstock.no_such_folder.thing:Thing") is None
    with pytest.raises(PreflightError, match=r"run --all needs penstock\.no_such_folder\.thing"):
        needed("penstock.no_such_folder.thing:Thing", "run --all")


def test_installed_package_adds_plug_in(extra: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = things(monkeypatch, extra)
    assert found.names == ("counter", "deque", "extra")
    assert found.get("extra").__name__ == "Extra"
    assert found.origin("extra") == "acme-penstock==1.2"


def test_unknown_plug_in_lists_known_names() -> None:
    with pytest.raises(SpecError, match=r"no thing 'counte'; there are counter, deque; did you mean 'counter'\?") as raised:
        Plugins("thing", "penstock.test_things", OWN).get("counte")
    assert "penstock.test_things" in raised.value.message
    with pytest.raises(SpecError, match=r"did you mean 'deque'\?"):  # a word of it, before what looks alike
        Plugins("thing", "penstock.test_things", OWN | {"dedupe_things": "collections:Counter"}).get("deque_things")


def test_package_that_fails_to_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = install_package(tmp_path, "penstock.test_things", 'broken = "acme_broken:Thing"', "import no_such_module\n")
    with pytest.raises(PreflightError, match=r"thing 'broken' of package acme-penstock .*no_such_module"):
        things(monkeypatch, site).get("broken")


def test_plug_in_without_needed_attribute_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = install_package(tmp_path, "penstock.test_things", 'odd = "acme_odd:THING"', "THING = 3\n")
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    with pytest.raises(PreflightError, match=r"thing 'odd' of package acme-penstock is 3 .*, which has no run"):
        Plugins("thing", "penstock.test_things", OWN, needs=("run",)).get("odd")


def test_other_version_on_node_is_refused_with_both(extra: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = things(monkeypatch, extra)
    found.require("extra", "acme-penstock==1.2")
    found.require("deque", None)
    with pytest.raises(PreflightError, match=r"acme-penstock==1\.1 in the driver and acme-penstock==1\.2 on"):
        found.require("extra", "acme-penstock==1.1")
    with pytest.raises(PreflightError, match="gone==1 in the driver and nothing of that name on"):
        found.require("gone", "gone==1")


def test_plug_in_with_penstocks_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = install_package(tmp_path, "penstock.test_things", 'deque = "acme_deque:Thing"', "class Thing:\n    pass\n")
    with pytest.raises(PreflightError, match="a name that penstock itself has"):
        things(monkeypatch, site).names  # noqa: B018 - the property raises


def test_plug_in_name_of_two_packages_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = "penstock.test_things"
    one = install_package(tmp_path / "1", group, 'extra = "acme_one:Thing"', "class Thing:\n    pass\n", name="acme-one")
    two = install_package(tmp_path / "2", group, 'extra = "acme_two:Thing"', "class Thing:\n    pass\n", name="acme-two")
    with pytest.raises(PreflightError, match=r"acme-two adds a thing 'extra'.*that acme-one too has"):
        things(monkeypatch, one, two).names  # noqa: B018 - the property raises
