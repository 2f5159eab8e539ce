"""The packages that `gpu.py` needs beside torch, as wheels in a folder that can be carried to a machine without a registry.

    benchmarks/gpu.sh --pack [FOLDER]     # here, with a registry; default: benchmarks/packages
    benchmarks/gpu.sh                     # there: it unpacks that folder, or the one that $PACKAGES names, if it exists

It needs nothing but Python and, to pack, pip. git ignores the folder, by a file in it.
"""

from __future__ import annotations

import argparse
import email.parser
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks" / "packages"
MOST_BYTES = 60 * 2**20

# What the library and its training step import; their own needs are found in the wheels.
WANTED = ("transformers", "accelerate", "safetensors", "huggingface-hub", "jinja2", "typer", "rich", "tqdm", "pyyaml")
# The machine has it, for CUDA.
PRESENT = frozenset({"torch"})
# Others of the machine's packages are built against its own: where it has one, that stays in use.
KEPT_IF_PRESENT = frozenset({"numpy"})

PYTHON = "3.12"
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 26, 24, 17, 12)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]


def pack(folder: Path, python: str = PYTHON) -> int:
    """Downloads the wheels of all needed packages, in the versions of constraints.txt, into an empty folder; their bytes.

    Raises:
        ValueError: for a folder that holds something else, a registry that does not give a package, or too many bytes.
    """
    _make_empty(folder)
    known: set[str] = set()
    missing = set(WANTED)
    while missing:
        _download(folder, sorted(missing), python)
        known |= missing
        missing = {name for wheel in folder.glob("*.whl") for name in needs(wheel, python)} - known - PRESENT
    num_bytes = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    if num_bytes > MOST_BYTES:
        largest = sorted(folder.glob("*.whl"), key=lambda wheel: -wheel.stat().st_size)[:3]
        raise ValueError(
            f"{folder} holds {_mib(num_bytes)}, more than the {_mib(MOST_BYTES)} that travel: remove packages that the machine "
            f"has; the largest are {', '.join(f'{wheel.name} ({_mib(wheel.stat().st_size)})' for wheel in largest)}."
        )
    return num_bytes


def _make_empty(folder: Path) -> None:
    others = [path.name for path in folder.glob("*") if path.suffix != ".whl" and path.name != ".gitignore"]
    if others or (folder.exists() and not folder.is_dir()):
        what = others[0] if others else "no folder"
        raise ValueError(f"{folder} cannot be packed into, it holds {what}: name a new folder.")
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in folder.glob("*.whl"):
        wheel.unlink()
    (folder / ".gitignore").write_text("*\n", encoding="utf-8")


def _download(folder: Path, names: Iterable[str], python: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "--constraint", str(ROOT / "constraints.txt")]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    command += ["--disable-pip-version-check", "--dest", str(folder), *names]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        errors = [line for line in ran.stderr.splitlines() if line.startswith("ERROR")] or ran.stderr.splitlines()
        raise ValueError(f"pip gives no wheels of {', '.join(names)}: {errors[-1] if errors else 'it says nothing'}")


def needs(wheel: Path, python: str) -> set[str]:
    """Names of the packages that a wheel needs on that Python on Linux, without those of its extras."""
    try:
        from packaging.requirements import Requirement
    except ImportError:  # Python and pip alone
        from pip._vendor.packaging.requirements import Requirement

    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]*\.dist-info/METADATA", name))
        said = email.parser.Parser().parsestr(archive.read(name).decode("utf-8"))
    machine = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "extra": "",
    }
    requirements = map(Requirement, said.get_all("Requires-Dist") or [])
    return {
        normal(requirement.name)
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate(machine)
    }


def normal(name: str) -> str:
    """A package's name in the one spelling that can be compared."""
    return name.lower().replace("_", "-").replace(".", "-")


def unpack(folder: Path, site: Path) -> list[str]:
    """Unpacks the wheels into a folder for PYTHONPATH; gives the names of those that were left out.

    Raises:
        ValueError: for a folder without wheels, or a file that is none.
    """
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise ValueError(f"{folder} holds no wheels: write them with benchmarks/gpu.sh --pack {folder}.")
    left_out = []
    for wheel in wheels:
        name = normal(wheel.name.split("-", 1)[0])
        if name in KEPT_IF_PRESENT and importlib.util.find_spec(name) is not None:
            left_out.append(name)
            continue
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
        except zipfile.BadZipFile as error:
            raise ValueError(f"{wheel} is no wheel ({error}): pack again.") from error
    # Where a wheel keeps modules apart from its root, an installer would move them.
    for kept_apart in [*site.glob("*.data/purelib"), *site.glob("*.data/platlib")]:
        shutil.copytree(kept_apart, site, dirs_exist_ok=True)
    return left_out


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="download the wheels")
    packing.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    packing.add_argument("--python", default=PYTHON, help="version of the other machine's Python")
    unpacking = commands.add_parser("unpack", help="make them importable")
    unpacking.add_argument("folder", type=Path)
    unpacking.add_argument("site", type=Path)
    args = parser.parse_args()
    try:
        if args.command == "pack":
            num_bytes = pack(args.folder, args.python)
            print(f"{args.folder}: {len(list(args.folder.glob('*.whl')))} wheels, {_mib(num_bytes)}")
        else:
            unpack(args.folder, args.site)
    except ValueError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
