"""Files that are whole or not there, each written by one process at a time."""

import glob
import json
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout


def followed(path: Path) -> Path:
    """`path`, or where it leads if it is a symbolic link: what is written there in one rename leaves the link.

    ValueError for a link into a folder that is not there, as on a disk that is not mounted.
    """
    path = path.expanduser().absolute()
    if not path.is_symlink():
        return path
    place = Path(os.path.realpath(path))
    if not place.parent.is_dir():
        raise ValueError(f"{path} is a link to {place}, whose folder does not exist: make it, or name another path.")
    return place


def write_text(path: Path, text: str) -> None:
    """Writes `path` aside and then renames it: a reader or an interruption never meets half a file; folders are made.

    OSError with its name if it cannot be written; what was at `path` before stays.
    """
    followed(path).parent.mkdir(parents=True, exist_ok=True)
    try:
        with replaced(path) as aside:
            aside.write_text(text, encoding="utf-8")
    except OSError as error:  # a full disk names no file
        raise type(error)(error.errno, error.strerror, str(path)) from error


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A path to write: its file replaces `path` at the end of the body, and is deleted after an error.

    A link stays one, and the file that it leads to is replaced.
    """
    path = followed(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def leftovers(path: Path, pattern: str) -> list[Path]:
    """What a killed process left beside `path`: hidden files and folders of its name, as `.NAME.PATTERN`."""
    return sorted(path.parent.glob(f".{glob.escape(path.name)}.{pattern}"))


def restore_replaced(folder: Path) -> None:
    """Clears away what a killed process moved aside to replace `folder`, or moves it back if there is no new one."""
    for old in leftovers(folder, "replaced-*"):
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:  # killed between the two renames
            old.rename(folder)


def adapter_fault(folder: str | os.PathLike[str]) -> str | None:
    """What is wrong with a folder that holds a peft adapter and no model, to be read after its name; else `None`."""
    path = Path(folder)
    weights = [*path.glob("model*.safetensors"), *path.glob("pytorch_model*.bin")]
    if weights or not (path / "adapter_config.json").is_file():
        return None
    return (
        "is a peft adapter, which holds no whole model: merge it first (merge_and_unload of peft, then save_pretrained), and "
        "give that folder."
    )


def check_writable(path: Path) -> None:
    """Raises OSError or ValueError if a file cannot be written at `path`: asked before minutes of work, not after."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file in it.")
    folder = next(parent for parent in followed(path).parents if parent.exists())
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder, so {path} cannot be written: name another path.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise PermissionError(13, "Permission denied", str(path))


def check_output(path: Path, overwrite: bool = True) -> None:
    """Raises as [`check_writable`], and ValueError if `path` is being written, or exists without `overwrite`."""
    check_writable(path)
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists: pass overwrite (--overwrite) to replace it, or name another path.")
    with only_writer(path):
        pass


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Keeps other processes of this machine from writing `path`, a file or a folder, while the body runs.

    The lock ends with the process, however it ends. A hidden file beside `path` names the process.

    Raises:
        ValueError: if another process writes `path`, with its number.
    """
    path = followed(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    holder = path.with_name(f".{path.name}.writer.json")
    lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"{path} is being written by {_holder(holder)}: wait for it, stop it, or choose another path."
        ) from None
    try:
        write_text(holder, json.dumps({"process": os.getpid(), "machine": platform.node()}))
        yield
    finally:
        holder.unlink(missing_ok=True)
        with suppress(OSError):  # Windows deletes no open file; a process that waits for a deleted file looks again
            Path(lock.lock_file).unlink()
        lock.release()


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        return f"process {holder['process']} on {holder['machine']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has not written its name yet
        return "another process"
