"""files: what a command writes, whole or not at all, and the check before long work that it can be written.

    check_file(path)            FileNotWritten now, and not after minutes
    write_whole(path, text)     beside the file, then in its place; a pipe or a device is written as it is
    put_folder(made, folder)    `made` as `folder`, whoever else does the same; what was there goes
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from v41.errors import FileNotWritten
from v41.lowering.kept import told

TRIES = 100  # of putting a folder in place while others put theirs there


def check_file(path: Path | None) -> None:
    """FileNotWritten where a file that is to be written cannot be, as far as one can tell ahead."""
    if path is None or (path.exists() and not path.is_file() and not path.is_dir()):
        return  # of a pipe nothing can be told
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        check_writable(path.resolve().parent)
    except OSError as error:
        raise FileNotWritten(path, problem=told(error)) from error


def check_writable(folder: Path) -> None:
    """OSError where nothing can be made in `folder`, a whole path, which may not be there yet. It is tried: what a
    system lets one write is more than permissions tell."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{there} is no folder")
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".v41.", dir=there))
    except OSError as error:
        raise type(error)(error.errno, f"nothing can be made in {there}: {error.strerror}") from error


def write_whole(path: Path, text: str) -> None:
    """Writes a file, or leaves it as it was. FileNotWritten where it cannot be written."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_text(text, encoding="utf-8")
            return
        with made_beside(path.resolve()) as folder:
            (folder / "made").write_text(text, encoding="utf-8")
            (folder / "made").replace(path.resolve())
    except OSError as error:
        raise FileNotWritten(path, problem=told(error)) from error


@contextmanager
def made_beside(path: Path) -> Iterator[Path]:
    """A folder for what is to become `path`; what is left in it goes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".v41.", dir=path.parent))  # short: the name of `path` may be as long as any
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def put_folder(made: Path, folder: Path) -> None:
    """`made` as `folder`, whose old content lies beside `made` once the new one is there."""
    old = made.with_name("old")
    try:
        for _ in range(TRIES):
            if _moved(made, folder):
                return
            shutil.rmtree(old, ignore_errors=True)
            with suppress(FileNotFoundError):  # another took it away, and puts its own there
                folder.rename(old)
        raise OSError(errno.EBUSY, "others put theirs there all the time")
    except BaseException:  # Ctrl-C as well
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise


def _moved(made: Path, folder: Path) -> bool:
    """Whether `made` is `folder` now: not where another one is there."""
    try:
        made.rename(folder)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True
