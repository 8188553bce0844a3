"""Objects of DVC's cache, held to their names.

DVC takes a read-only file of its cache at its word: what was written through a link, by a disk or
by a remote, it would link again, record as the result and send on. Here an object is hashed before
it is linked or sent, and where it could have changed since it was hashed."""

import os
import time
from pathlib import Path

from dvc.exceptions import DvcException
from dvc_data.fsutils import _localfs_info
from dvc_data.hashfile.meta import Meta
from dvc_data.hashfile.tree import Tree
from dvc_objects.errors import ObjectFormatError

from eagle3.build.shared import log
from eagle3.core.dvc_cache import Verified


class HostileListing(DvcException):
    """A folder's listing names a file outside of the folder."""


class Guard:
    """Takes the place of the check of a repository's cache. With `again` set, what is asked for is
    hashed once more by this process, whatever is known of it: before it is linked or sent."""

    def __init__(self, repo, again: bool = False):
        self.cache, self.again = repo.cache.local, again
        self.verified, self._seen = Verified(), set()
        self.dropped: set[str] = set()  # digests
        self.cache.check = self.check
        Tree.from_list = classmethod(_inside_its_folder)

    def check(self, oid: str, check_hash: bool = True, _info: dict | None = None) -> Meta:
        """Stands in for the cache's own. A damaged object is named and removed. Raises
        FileNotFoundError, ObjectFormatError."""
        path = Path(self.cache.oid_to_path(oid))
        if not self.verified.is_whole(path, again=self.again and oid not in self._seen):
            log(
                f"{oid[:8]} in DVC's cache is damaged ({path.stat().st_size:,} bytes that are not "
                "those of its name), and is removed"
            )
            path.unlink()
            self.dropped.add(oid)
            raise ObjectFormatError(f"{path} is damaged")
        if self.again:
            self._seen.add(oid)
        return Meta.from_info(_localfs_info(str(path)))

    def made(self, stage) -> None:
        """Notes the outputs of a stage, which DVC has hashed just now, so that a terabyte is not
        hashed once more. `Verified` takes no file that changed a moment ago."""
        time.sleep(0.03)
        for oid in used(stage):
            path = Path(self.cache.oid_to_path(oid))
            if path.exists():
                self._seen.add(oid)
                self.verified.add(path)

    def damaged(self, stage) -> list[str]:
        """Outputs of a stage, as recorded, whose objects are here but damaged; removes them."""
        found = []
        for oid in used(stage):
            try:
                self.check(oid)
            except ObjectFormatError:
                found.append(oid)
            except FileNotFoundError:
                pass
        return found


def used(stage) -> list[str]:
    """Digests of all that the recorded outputs of a stage consist of, listings first, as far as the
    listings are here."""
    found: dict[str, None] = {}
    for out in stage.outs:
        if out.hash_info and out.use_cache:
            found[out.hash_info.value] = None
            tree = out.get_obj() if out.hash_info.isdir else None
            found |= dict.fromkeys(info.value for _, _, info in tree or ())
    return list(found)


_from_list = Tree.from_list.__func__


def _inside_its_folder(cls, entries, hash_name: str | None = None):
    """Stands in for DVC's reader of a listing. Raises HostileListing for a path that leads out."""
    for entry in entries:
        path = str(entry.get("relpath", ""))
        if not path or os.path.isabs(path) or os.path.normpath(path) != path or path[:2] == "..":
            raise HostileListing(
                f"a listing names {path!r}, which is no file inside its folder; nothing of it is "
                "used. Somebody else writes to this remote: ask who, or remove it with `dvc remote "
                "remove`"
            )
    return _from_list(cls, entries, hash_name)
