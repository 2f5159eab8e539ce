"""The packages that `gpu.py` needs beside torch, as wheels in a folder that can be carried to a machine without a registry.

    benchmarks/gpu.sh --pack [FOLDER]     # here, with a registry; default: benchmarks/packages
    benchmarks/gpu.sh                     # there: unpacks that folder, or the one that $PACKAGES names, if it exists

Packing needs this library's environment and pip; unpacking needs Python alone. git ignores the folder, by a file in it.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks" / "packages"
MOST_BYTES = 60 * 2**20

# What the library and its training step import; their own needs are those of the packages installed here.
WANTED = ("transformers", "accelerate", "filelock", "jinja2", "rich", "typer")
# The machine has it, for CUDA, with what it needs itself.
PRESENT = "torch"
# Others of the machine's packages are built against its own: where it has one, that stays in use.
KEPT_IF_PRESENT = frozenset({"numpy"})

PYTHON = "3.12"
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 26, 24, 17, 12)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]


def pack(folder: Path) -> int:
    """Downloads the wheels of all needed packages, in the versions of constraints.txt, into an empty folder; their bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    others = [path.name for path in folder.iterdir() if path.suffix != ".whl" and path.name != ".gitignore"]
    if others:
        raise ValueError(f"{folder} cannot be packed into, it holds {others[0]}: name a new folder.")
    for wheel in folder.glob("*.whl"):
        wheel.unlink()
    (folder / ".gitignore").write_text("*\n", encoding="utf-8")
    download(folder, sorted(needed(WANTED)))
    sizes = {wheel.name: wheel.stat().st_size for wheel in folder.glob("*.whl")}
    num_bytes = sum(sizes.values())
    if num_bytes > MOST_BYTES:
        largest = [f"{name} ({_mib(sizes[name])})" for name in sorted(sizes, key=sizes.__getitem__)[:-4:-1]]
        raise ValueError(
            f"{folder} holds {_mib(num_bytes)}, more than the {_mib(MOST_BYTES)} that travel: remove packages that the machine "
            f"has; the largest are {', '.join(largest)}."
        )
    return num_bytes


def needed(names: tuple[str, ...]) -> set[str]:
    """These packages and all that they need, without torch and without extras, as installed in this environment."""
    from packaging.requirements import Requirement

    found, missing = set[str](), list(names)
    while missing:
        name = re.sub(r"[-_.]+", "-", missing.pop()).lower()
        if name in found or name == PRESENT:
            continue
        found.add(name)
        requirements = map(Requirement, metadata.requires(name) or [])
        machine = {"extra": "", "python_version": PYTHON, "python_full_version": f"{PYTHON}.0"}
        missing += [need.name for need in requirements if need.marker is None or need.marker.evaluate(machine)]
    return found


def download(folder: Path, names: list[str]) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", PYTHON, "--implementation", "cp", "--constraint", str(ROOT / "constraints.txt")]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    command += ["--disable-pip-version-check", "--dest", str(folder), *names]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        errors = [line for line in ran.stderr.splitlines() if line.startswith("ERROR")] or ran.stderr.splitlines()
        raise ValueError(f"pip gives no wheels of {', '.join(names)}: {errors[-1] if errors else 'it says nothing'}")


def unpack(folder: Path, site: Path) -> list[str]:
    """Unpacks the wheels into a folder for PYTHONPATH; returns the names of those that were left out."""
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise ValueError(f"{folder} holds no wheels: write them with benchmarks/gpu.sh --pack {folder}.")
    left_out = []
    for wheel in wheels:
        name = wheel.name.split("-", 1)[0].lower()
        if name in KEPT_IF_PRESENT and importlib.util.find_spec(name) is not None:
            left_out.append(name)
            continue
        try:
            shutil.unpack_archive(wheel, site, "zip")
        except shutil.ReadError as error:
            raise ValueError(f"{wheel} is no wheel ({error}): pack again.") from error
    # Where a wheel keeps modules apart from its root, an installer would move them.
    for kept_apart in [*site.glob("*.data/purelib"), *site.glob("*.data/platlib")]:
        shutil.copytree(kept_apart, site, dirs_exist_ok=True)
    return left_out


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


if __name__ == "__main__":
    what, *paths = sys.argv[1:]
    try:
        if what == "unpack":
            unpack(*map(Path, paths))
        else:
            chosen = Path(paths[0]) if paths else FOLDER
            print(f"{chosen}: {_mib(pack(chosen))}")
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None
