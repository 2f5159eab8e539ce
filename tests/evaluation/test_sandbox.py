"""Programs that a model wrote are confined: what SECURITY.md says of them, attacked as root and as another user.

`hostile_evaluator.py` has files, sockets and an environment to lose, and runs the attacks of `hostile_program.py`. It is started as the
user of the tests and, where that is root, as another user and with a Python that another user can read. It is started once more with a
kernel that has no Landlock, and with one that has no filter for system calls.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import os
import platform
import runpy
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from dflash.evaluation import Limits, run_program, sandbox, sandbox_child


if sys.platform != "linux" or platform.machine() not in sandbox_child.MACHINES:
    pytest.skip("programs are not confined here", allow_module_level=True)

TESTS = Path(__file__).parents[1]
NOBODY = 65534
NO_FACTS = {"parent": 0, "victim": "", "folder": "", "secret": "", "open_files": [], "key": "0", "allowed": []}
PROGRAM = runpy.run_path(str(TESTS / "hostile_program.py"), {"FACTS": NO_FACTS}, "attacks")
SECCOMP = ctypes.CDLL("libseccomp.so.2")
SECCOMP.seccomp_init.restype = ctypes.c_void_p
REFUSED = ("EPERM", "EACCES", "ENOSYS", "ENOTTY")
HAS_LANDLOCK = ctypes.CDLL(None).syscall(sandbox_child.CREATE_RULESET, None, 0, 1) > 0
SMALL = Limits(wall_seconds=1.5, cpu_seconds=1, memory_bytes=2**28, file_bytes=2**20)


def evaluate(python: str, user: int, missing: str = "") -> dict[str, Any]:
    """What a hostile program achieves against an evaluator."""
    as_user: dict[str, Any] = {} if user == os.geteuid() else {"user": user, "group": user, "extra_groups": []}
    words = [python, str(TESTS / "hostile_evaluator.py"), *filter(None, [missing])]
    done = subprocess.run(words, cwd="/", env={"HONEST": "token"}, capture_output=True, text=True, **as_user)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@functools.cache
def python_of_others() -> str | None:
    """A Python that another user can start here."""
    for python in (sys.executable, "/usr/bin/python3"):
        words = [python, "-c", f"import sys; sys.path.insert(0, {str(TESTS)!r}); import hostile_evaluator"]
        try:
            subprocess.run(words, user=NOBODY, group=NOBODY, extra_groups=[], check=True, cwd="/", capture_output=True)
        except (OSError, subprocess.SubprocessError):
            continue
        return python
    return None


def evaluators() -> dict[str, tuple[str, int]]:
    """A Python and a user each."""
    known = {"own": (sys.executable, os.geteuid())}
    if os.geteuid() == 0 and python_of_others() is not None:
        known["root"] = (str(python_of_others()), 0)
        known["another user"] = (str(python_of_others()), NOBODY)
    return known


@functools.cache
def reports(missing: str = "") -> dict[str, dict[str, Any]]:
    """By evaluator, on a kernel without the call `missing`."""
    return {name: evaluate(*evaluator, missing) for name, evaluator in evaluators().items()}


def all_reports() -> dict[str, dict[str, Any]]:
    """On the kernel as it is, and without Landlock."""
    without = {f"{name} without Landlock": report for name, report in reports("landlock_create_ruleset").items()}
    return reports() | without


@pytest.mark.parametrize("attack", PROGRAM["ATTACKS"])
def test_attack_is_refused(attack: str) -> None:
    """Promise: the kernel refuses each of these calls, whoever evaluates."""
    for evaluator, report in all_reports().items():
        assert report["attacks"][attack] in (*REFUSED, "no such call"), evaluator


def test_evaluator_is_unharmed() -> None:
    """Promise: its file is what it was, nothing was made, sent or left, and its memory may be read again as before."""
    for evaluator, report in all_reports().items():
        assert report["changed"] == [], evaluator
        assert report["files"] == ["secret", "victim"], evaluator
        assert report["sent"] == "", evaluator
        assert report["queues"] == [], evaluator
        assert report["dumpable"] == 1, evaluator


# An earlier filter refused the calls of a list, and most of these were not on it.
DANGEROUS = [
    "chroot", "pivot_root", "sethostname", "settimeofday", "clock_settime", "adjtimex", "swapoff", "acct", "syslog",
    "fsopen", "fsmount", "open_tree", "move_mount", "mount_setattr", "fanotify_init", "perf_event_open", "userfaultfd",
    "sched_setaffinity", "sched_setscheduler", "sched_setattr", "ioprio_set", "setuid", "add_key", "quotactl",
    "process_madvise", "name_to_handle_at", "open_by_handle_at", "pidfd_open", "pidfd_getfd", "mq_open", "msgget",
    "fchmod", "fchown", "fsetxattr", "process_vm_readv", "keyctl", "mount", "ptrace", "bpf", "io_uring_setup",
]  # fmt: skip


@pytest.mark.parametrize("name", DANGEROUS)
def test_call_does_not_reach_the_kernel(name: str) -> None:
    """Promise: wrong arguments are not even looked at, which would be another error."""
    number = SECCOMP.seccomp_syscall_resolve_name(name.encode())
    if number < 0:
        pytest.skip("newer than this libseccomp; the next test finds it by its number")
    for evaluator, report in all_reports().items():
        assert report["swept"][str(number)] == "EPERM", evaluator


def test_no_other_call_reaches_the_kernel() -> None:
    """Promise: what is not on the list is refused, by whatever number."""
    for evaluator, report in all_reports().items():
        reached = {number: error for number, error in report["swept"].items() if error not in REFUSED}
        assert reached == {}, evaluator
        assert len(report["swept"]) > 500


@pytest.mark.skipif(not HAS_LANDLOCK, reason="this kernel has no Landlock")
@pytest.mark.parametrize("attack", PROGRAM["READS"])
def test_other_files_cannot_be_read(attack: str) -> None:
    """Promise: with Landlock, no file but those of Python, the system's libraries and the program."""
    for evaluator, report in reports().items():
        assert report["reads"][attack] == "EACCES", evaluator


def test_files_of_its_user_can_be_read_without_landlock_and_seen_with_it() -> None:
    """What SECURITY.md says does not hold."""
    for evaluator, report in reports().items():
        is_its_user = evaluators()[evaluator][1] == report["user"]
        assert (report["sees"] == "done") == is_its_user, evaluator
    for evaluator, report in reports("landlock_create_ruleset").items():
        is_its_user = evaluators()[evaluator][1] == report["user"]
        assert (report["reads"]["read a secret"] == "done") == is_its_user, evaluator


def test_program_of_root_has_no_right_of_root() -> None:
    """Promise: it has no capability, and another user where that one can read the interpreter."""
    for evaluator, report in reports("landlock_create_ruleset").items():
        assert report["capabilities"] == ["0000000000000000"] * 4, evaluator
    if os.geteuid() == 0:
        if python_of_others() is None:
            pytest.skip("no Python here that another user can start")
        for report in (reports()["root"], reports("landlock_create_ruleset")["root"]):
            assert (report["user"], report["group"], report["groups"]) == (NOBODY, NOBODY, [])


def test_honest_program_runs() -> None:
    """Promise: what solutions do with right is not refused: threads, clocks, random numbers, time zones, deep recursion, `/dev/stdin`."""
    for evaluator, report in all_reports().items():
        assert report["honest"] == [0, "honest\n", "", True], evaluator


def test_numpy_can_be_used() -> None:
    pytest.importorskip("numpy")
    outcome = run_program(
        "import numpy\nprint(numpy.linalg.inv(numpy.eye(3)).sum(), numpy.random.default_rng(0).integers(1))"
    )
    assert outcome.output == "3.0 0\n", outcome


def test_without_a_filter_nothing_runs_unless_it_is_asked_for() -> None:
    """Promise: where programs cannot be confined, scoring refuses with both remedies, and `--unsafe-code` runs them."""
    for evaluator, report in reports("seccomp").items():
        of_program, of_scorers = report["said"]
        assert "cannot be confined here: the kernel takes no filter for system calls; " in of_program, evaluator
        assert "Limits(unsafe_code=True)" in of_program
        assert "--no-score" in of_scorers
        assert "--unsafe-code" in of_scorers
        assert report["unsafe"] == "42\n"


@pytest.mark.parametrize(("place", "said"), [("darwin", "darwin on"), ("linux", "on riscv64 has no filter")])
def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch, place: str, said: str) -> None:
    monkeypatch.setattr(sys, "platform", place)
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(OSError, match=said):
        sandbox_child.confine("program.py")


def test_missing_library_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(OSError, match=r"libseccomp\.so\.2 is not installed .*apt install libseccomp2"):
        sandbox_child.filter_calls()


def test_memory_stays_closed_until_the_last_program_has_ended() -> None:
    """Promise: programs that run side by side, in threads of one evaluator, are each kept out until their own end."""
    prctl = ctypes.CDLL(None).prctl
    assert prctl(sandbox.PR_GET_DUMPABLE, 0, 0, 0, 0) == 1
    with sandbox._closed_to_others():
        with sandbox._closed_to_others():
            assert prctl(sandbox.PR_GET_DUMPABLE, 0, 0, 0, 0) == 0
        assert prctl(sandbox.PR_GET_DUMPABLE, 0, 0, 0, 0) == 0
    assert prctl(sandbox.PR_GET_DUMPABLE, 0, 0, 0, 0) == 1


def test_limits_kill_by_the_kernel_and_by_the_clock() -> None:
    deaf = "import signal\nfor s in (2, 15, 24): signal.signal(s, signal.SIG_IGN)\nwhile True: pass"
    assert run_program(deaf, limits=Limits(60, cpu_seconds=1)).status == -signal.SIGKILL
    assert run_program("import time\ntime.sleep(60)", limits=Limits(wall_seconds=0.3)).status is None
    assert "MemoryError" in run_program("[bytearray(10**7) for _ in range(10**4)]", limits=SMALL).errors
    endless = run_program("while True: print('x' * 10**6)", limits=SMALL)
    assert len(endless.output) <= SMALL.file_bytes
    assert endless.status == -signal.SIGXFSZ or "File too large" in endless.errors
    assert run_program("import ctypes\nctypes.string_at(0)").status == -signal.SIGSEGV
    assert run_program("import os\nos.abort()").status == -signal.SIGABRT


def test_page_states_the_limits() -> None:
    limits = Limits()
    said = (
        f"{limits.cpu_seconds} seconds of processor time, {limits.wall_seconds:.0f} seconds in all, "
        f"{limits.memory_bytes // 2**30} GiB of memory and {limits.file_bytes // 2**20} MiB of output"
    )
    assert said in (TESTS.parent / "SECURITY.md").read_text(encoding="utf-8")


def test_program_starts_in_an_empty_folder_without_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    source = (
        "import os, sys\nprint(os.listdir('.'), 'SECRET' in os.environ, sys.flags.isolated, repr(sys.stdin.read()))"
    )
    assert run_program(source).output == "[] False 1 ''\n"
    assert run_program("print(input())", stdin="given\n").output == "given\n"


def test_tests_run_after_the_program_in_its_names() -> None:
    """Promise: a program has passed if it and its tests reach their ends, and it cannot read them before."""
    assert run_program("x = 2", tests="assert x == 2").passed
    assert not run_program("x = 2", tests="assert x == 3").passed
    assert not run_program("x = 2\nraise SystemExit(0)", tests="assert x == 2").passed
    assert not run_program("x = 2", tests="raise SystemExit(0)").passed
    assert run_program("x = 2", tests=f"assert x == 2  # {'long ' * 10**6}").passed
    search = "import os, glob\nfound = [p for p in glob.glob('../*.*') if 'needle' + 'word' in open(p).read()]\nprint(found)"
    assert run_program(search, tests="'needleword'").output == "[]\n"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other machines have no other numbering")
def test_call_in_another_numbering_kills() -> None:
    """Promise: the 32-bit twins of x86_64 and i386's calls, which have numbers of their own, are no way around."""
    x32 = "import ctypes\nctypes.CDLL(None).syscall(ctypes.c_long(0x40000000 | 39))\nprint('called')"
    i386 = (
        "import ctypes, mmap\n"
        "page = mmap.mmap(-1, 4096, prot=7)\n"
        "page.write(bytes.fromhex('b814000000cd80c3'))  # getpid by int 0x80\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()\n"
        "print('called')"
    )
    assert run_program(x32).status == -signal.SIGSYS
    assert run_program(i386).status in (-signal.SIGSYS, -signal.SIGSEGV)  # a kernel may have no such calls


NATIVE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


@functools.cache
def filter_of(machine: str) -> list[tuple[int, int, int, int]]:
    """The kernel's program that the rules become on a machine: instruction, steps to skip if true and if false, operand."""
    rules = ctypes.c_void_p(SECCOMP.seccomp_init(sandbox_child.REFUSE | errno.EPERM))
    if machine != platform.machine():
        assert SECCOMP.seccomp_arch_add(rules, NATIVE[machine]) == 0
        assert SECCOMP.seccomp_arch_remove(rules, NATIVE[platform.machine()]) == 0
    sandbox_child.add_rules(SECCOMP, rules)
    with tempfile.TemporaryFile() as file:
        assert SECCOMP.seccomp_export_bpf(rules, file.fileno()) == 0
        file.seek(0)
        return list(struct.iter_unpack("=HBBI", file.read()))


def filtered(machine: str, number: int, arguments: tuple[int, ...] = (), audit: int | None = None) -> int:
    """What the kernel makes of a call, by that program, interpreted naively."""
    data = struct.pack("=IIQ6Q", number, audit or NATIVE[machine], 0, *(*arguments, 0, 0, 0, 0, 0, 0)[:6])
    program, place, value = filter_of(machine), 0, 0
    while True:
        instruction, if_true, if_false, operand = program[place]
        place += 1
        if instruction == 0x06:
            return operand
        if instruction == 0x20:
            value = struct.unpack_from("=I", data, operand)[0]
        elif instruction == 0x54:
            value &= operand
        elif instruction == 0x05:
            place += operand
        else:
            holds = {0x15: value == operand, 0x25: value > operand, 0x35: value >= operand}[instruction]
            place += if_true if holds else if_false


def number_of(machine: str, name: str) -> int:
    return SECCOMP.seccomp_syscall_resolve_name_arch(NATIVE[machine], name.encode())


@pytest.mark.parametrize("machine", NATIVE)
def test_filter_allows_its_list_alone(machine: str) -> None:
    """Promise: on the machine that the tests do not run on too."""
    allowed = {number_of(machine, name) for name in sandbox_child.ALLOWED}
    fallbacks = {number_of(machine, name): error for name, error in sandbox_child.FALLBACKS.items()}
    wrong = (2**64 - 1,) * 6
    for number in range(1000):
        refusal = sandbox_child.REFUSE | fallbacks.get(number, errno.EPERM)
        assert filtered(machine, number, wrong) == (sandbox_child.ALLOW if number in allowed else refusal), number
        assert filtered(machine, number, audit=0x40000003) == sandbox_child.KILL
    assert filtered(machine, 0x40000000 | 59) != sandbox_child.ALLOW


THREAD = 0x3D0F00  # as the C library asks for one
ARGUMENTS = {
    "openat": ([(0, 0, os.O_RDONLY), (0, 0, os.O_RDONLY | os.O_CLOEXEC)], [(0, 0, flag) for flag in (1, 2, 3, 0o100, 0o1000, 0o4100)]),
    "clone": ([(THREAD,), (THREAD | 0x400000,)], [(17,), (0,), (THREAD | 0x1000,), (THREAD | 0x20000000,), (THREAD & ~0x10000,)]),
    "prctl": ([(15,), (16,)], [(4, 1), (15 << 32 | 4, 1), (22, 2)]),
    "fcntl": ([(0, 1), (0, 0), (0, 1030)], [(0, 8), (0, 6), (0, 1024), (0, 4)]),
    "tgkill": ([(os.getpid(),)], [(1,), (0,), (os.getppid(),), (2**32 - 1,)]),
    "prlimit64": ([(0, 7, 0)], [(0, 7, 1), (1, 7, 0), (0, 7, 1 << 32)]),
}  # fmt: skip


@pytest.mark.parametrize("machine", NATIVE)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_filter_looks_at_arguments(machine: str, name: str) -> None:
    """Promise: files are opened to read alone, clones are threads, and the rest is about the process itself."""
    right, wrong = ARGUMENTS[name]
    for arguments in right:
        assert filtered(machine, number_of(machine, name), arguments) == sandbox_child.ALLOW, arguments
    for arguments in wrong:
        assert filtered(machine, number_of(machine, name), arguments) == sandbox_child.REFUSE | errno.EPERM, arguments
