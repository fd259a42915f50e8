"""What has been added to penstock under a name: formats, transforms, frameworks, trackers, model registries?

Each kind has one `Plugins` object beside its protocol. What penstock brings is named there, one line each. What another
installed package adds is found by its entry points, and imported when it is used:

    [project.entry-points."penstock.formats"]
    fastq = "our_formats.fastq:FastqFormat"

A plug-in of penstock's own is a folder that may be deleted (CONTRIBUTING, "Core and border"): the core names what is in it as
`module:attribute` and never imports it. A name whose module is not there is not there either.

Imports nothing heavy, so that reading a pipeline file stays fast.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from penstock.errors import PreflightError, SpecError
from penstock.installed import versions_of
from penstock.messages import describe_error, did_you_mean

__all__ = ["Plugins", "is_there", "needed", "optional"]

T_co = TypeVar("T_co", covariant=True)


def is_there(place: str) -> bool:
    """Return False if `module:attribute` names a deleted module of penstock; True for other packages, unseen."""
    module = place.partition(":")[0]
    try:
        return not module.startswith("penstock.") or importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the folder around it was deleted, too
        return False


def optional(place: str) -> Any | None:
    """Return what lies at `module:attribute` of a plug-in, imported now; None if the plug-in was deleted."""
    return _attribute(place) if is_there(place) else None


def needed(place: str, what: str) -> Any:
    """Return what lies at `module:attribute` of a plug-in, imported now.

    Args:
        what: what needs it, in words, for the message.

    Raises:
        PreflightError: the plug-in was deleted.
    """
    if not is_there(place):
        raise PreflightError(
            f"{what} needs {place.partition(':')[0]}, a plug-in that this installation of penstock lacks on {platform.node()}",
            next_step="install penstock with all its plug-ins",
        )
    return _attribute(place)


def _attribute(place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


class Plugins(Generic[T_co]):
    """The things of one kind, by name.

    Args:
        what: one of them in words, for messages: `format`.
        group: the entry-point group that adds more: `penstock.formats`.
        own: name to `module:attribute`, of those that penstock brings. Their names cannot be taken by others. One whose module
            was deleted with its plug-in is left out.
        needs: attributes that an added one must have.
    """

    def __init__(self, what: str, group: str, own: Mapping[str, str], needs: Sequence[str] = ()) -> None:
        self.what, self.group, self._needs = what, group, needs
        self._places = dict(own)

    @property
    def names(self) -> tuple[str, ...]:
        """All names: penstock's own in their order, then the added ones, sorted."""
        return *self._own, *sorted(self._added)

    @property
    def usable(self) -> tuple[str, ...]:
        """All of penstock's own names, and the added ones whose package can be imported and fits. Imports the latter."""
        return tuple(name for name in self.names if name in self._own or self._is_usable(name))

    def _is_usable(self, name: str) -> bool:
        try:
            self._load(name)
        except PreflightError:
            return False
        return True

    def get(self, name: str) -> T_co:
        """Return the thing of that name, imported on the first call.

        Raises:
            SpecError: no such name; the message lists the known ones.
            PreflightError: the package that adds it cannot be imported, it lacks one of `needs`, two packages add it, or a
                library is missing that comes with an extra of penstock.
        """
        found: T_co = self._load(name)
        return found

    def require(self, name: str, origin: str | None) -> None:
        """Refuse a name that this process has of another package, or of another version of it, than the driver has.

        Args:
            origin: result of `origin(name)` in the driver.

        Raises:
            PreflightError: it names both, and the machine.
        """
        here = self.origin(name) if name in self.names else "nothing of that name"
        if here != origin:
            raise PreflightError(
                f"the {self.what} {name!r} is {origin or 'of penstock'} in the driver and {here or 'of penstock'} on "
                f"{platform.node()}",
                next_step="install the same version of the package on every node",
            )

    def origin(self, name: str) -> str | None:
        """Return `distribution==version` of the package that adds the name, for keys and records; None for penstock's own.

        The version of an editable package has a digest of its sources.
        """
        if name in self._own:
            return None
        entry = self._added[name]
        if entry.dist is None:
            return entry.value
        versions = versions_of({entry.module.split(".")[0]})
        return f"{entry.dist.name}=={versions.get(entry.dist.name, entry.dist.version)}"

    @functools.cached_property
    def _own(self) -> dict[str, str]:
        return {name: place for name, place in self._places.items() if is_there(place)}

    @functools.cached_property
    def _added(self) -> dict[str, EntryPoint]:
        found: dict[str, EntryPoint] = {}
        for entry in entry_points(group=self.group):
            other = found.get(entry.name)
            if entry.name in self._own or (other is not None and other.value != entry.value):
                taken = "penstock itself" if other is None else f"{_package(other)} too"
                raise PreflightError(
                    f"the package {_package(entry)} adds a {self.what} {entry.name!r} ({self.group}), a name that {taken} has",
                    next_step="uninstall one of them, or rename it in its package",
                )
            found[entry.name] = entry
        return found

    @functools.cache  # noqa: B019 - one object per kind, which lives as long as the process
    def _load(self, name: str) -> Any:
        if name in self._own:
            try:
                return _attribute(self._own[name])
            except ModuleNotFoundError as error:
                raise PreflightError(
                    f"the {self.what} {name!r} needs {error.name}, which is not installed on {platform.node()}",
                    next_step=f'pip install "penstock[{name}]"',
                ) from error
        if name not in self._added:
            words = set(name.split("_"))
            # one_hot, of one_hot_encoder; decode_image, of image
            alike = [known for known in self.names if words >= {*known.split("_")} or words <= {*known.split("_")}]
            hint = f"; did you mean {max(alike, key=len)!r}?" if alike else did_you_mean(name, self.names)
            raise SpecError(
                f"there is no {self.what} {name!r}; there are {', '.join(self.names)}{hint}"
                f" (or install the package that adds it: an entry point of group {self.group})",
                next_step="correct the name, or install the package",
            )
        entry = self._added[name]
        try:
            found = entry.load()
        except Exception as error:  # another package's code: any error is reported with the package's name
            raise PreflightError(
                f"the {self.what} {name!r} of package {_package(entry)} cannot be imported ({entry.value}): "
                f"{describe_error(error)}",
                next_step=f"repair or reinstall {_package(entry)}",
            ) from error
        lacking = [attribute for attribute in self._needs if not hasattr(found, attribute)]
        if lacking:
            raise PreflightError(
                f"the {self.what} {name!r} of package {_package(entry)} is {found!r} ({entry.value}), which has no "
                f"{', '.join(lacking)}",
                next_step=f"correct the entry point of the group {self.group}, or what it names, in {_package(entry)}",
            )
        return found


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value
