"""Putting a bundle in its place: whole or not at all, and never over something else."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from moa_export.errors import ExportError, ParityError
from moa_export.progress import Progress
from moa_runtime.manifest import MANIFEST_FILE, BundleError, read_manifest

#: File in the scratch folder that a running export has locked.
_LOCK = "running.lock"


def rejected_path(out: Path) -> Path:
    """Where an export that failed its check is left for inspection."""
    return out.with_name(f"{out.name}.rejected")


def check_output(out: Path, *, force: bool) -> None:
    """Refuse an output folder that must not be replaced; called before the long work.

    Raises:
        ExportError: the folder exists and ``force`` is not set, or it is no bundle.
    """
    if not os.path.lexists(out):
        return
    if not force:
        raise ExportError(f"{out} exists already: give another folder, or --force to replace a bundle", code="exists")
    _check_deletable(out)


@contextmanager
def only_maker(out: Path, progress: Progress) -> Iterator[None]:
    """Let one program at a time make the bundle ``out``, which several may need at once; waiting for another is shown.

    The caller looks inside the block whether the other one has made it.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{out}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        with progress.stage("another program is making it; waiting"):
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def staged_bundle(out: Path, *, force: bool) -> Iterator[Path]:
    """A new folder beside ``out`` that takes its name when the block ends well.

    After a :class:`ParityError` it takes the name of :func:`rejected_path` instead; after any other error it
    is removed. ``out`` is untouched until the very end. What an earlier export left that was killed is removed.

    Raises:
        ExportError: see :func:`check_output`; also a place that cannot be written, such as a full disk.
    """
    check_output(out, force=force)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(out)
        with (
            tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch,
            FileLock(Path(scratch) / _LOCK),
        ):
            stage = Path(scratch) / "bundle"
            stage.mkdir()
            try:
                yield stage
            except ParityError:
                _put(stage, rejected_path(out), Path(scratch))
                raise
            check_output(out, force=force)
            _put(stage, out, Path(scratch))
    except OSError as error:
        code = "disk_full" if error.errno == errno.ENOSPC else "unwritable"
        raise ExportError(f"cannot write the bundle {out}: {error.strerror or error}", code=code) from error


def _remove_abandoned(out: Path) -> None:
    """Remove the folders of earlier exports to ``out`` that were killed; those that still run hold their lock."""
    for scratch in out.parent.glob(f".{glob.escape(out.name)}-????????"):  # as tempfile names them
        with contextlib.suppress(Timeout):
            if (scratch / _LOCK).is_file():
                with FileLock(scratch / _LOCK, blocking=False):
                    shutil.rmtree(scratch, ignore_errors=True)


def _put(stage: Path, place: Path, scratch: Path) -> None:
    """Rename ``stage`` to ``place``; a bundle that lies there moves to ``scratch``, and back if that fails."""
    if not os.path.lexists(place):
        stage.rename(place)
        return
    _check_deletable(place)
    old = scratch / "replaced"
    place.rename(old)
    try:
        stage.rename(place)
    except OSError:
        old.rename(place)
        raise
    shutil.rmtree(old)


def _check_deletable(folder: Path) -> None:
    """Only a bundle, and only if nothing else lies in it, may be deleted.

    Raises:
        ExportError: anything else.
    """
    if folder.is_symlink():
        raise ExportError(f"{folder} is a link: --force replaces bundles only", code="no_bundle")
    try:
        known = {MANIFEST_FILE, *read_manifest(folder).files}
    except BundleError as error:
        reason = f"{folder} is not a bundle, so --force does not replace it: {error}"
        raise ExportError(reason, code="no_bundle") from error
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    if foreign := sorted(present - known):
        reason = f"{folder} holds {foreign[0]}, which moa-export did not write: move it away first"
        raise ExportError(reason, code="foreign_file")
