"""Finds the version of a downloaded model by its folder: a hub's commit, or the digest of a bucket's listing."""

from pathlib import Path

from octavo_engine.sources.download_dir import read_complete_snapshot

#: Schemes of sources whose versions say more than the times of local files.
_REMOTE = ("hf", "ms", "s3", "gs", "az", "azure")


def fetched_revision(folder: Path) -> str:
    """Return the version of the files in a folder; empty for local files, which have none.

    The Hugging Face cache has a folder per commit (`models--ORG--NAME/snapshots/COMMIT`); a folder that this package
    filled has a marker file.
    """
    for place in (folder, *folder.parents):
        if place.parent.name == "snapshots" and place.parent.parent.name.startswith("models--"):
            return place.name
    snapshot = read_complete_snapshot(folder)
    return "" if snapshot is None or snapshot.uri.partition("://")[0] not in _REMOTE else snapshot.version
