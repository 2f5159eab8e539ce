"""An evaluator with something to lose, that runs `hostile_program.py` confined and says what became of it.

Started as `python hostile_evaluator.py [CALL,…]`, by any user and any Python; the kernel that it sees lacks the system calls that it names.
"""

import contextlib
import ctypes
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path


ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from dflash.evaluation import Limits, check_scorers, run_program, sandbox_child  # noqa: E402


PROGRAM = Path(__file__).with_name("hostile_program.py").read_text(encoding="utf-8")
LSATTR = shutil.which("lsattr")
HONEST = """
import bisect, collections, concurrent.futures, datetime, decimal, hashlib, heapq, itertools, json, math, os, random, re, signal
import statistics, string, sys, tempfile, threading, time, typing, zoneinfo

given = sys.stdin.read()
sys.setrecursionlimit(10**6)
threading.stack_size(2**26)
deep = lambda n: 0 if n == 0 else 1 + deep(n - 1)
found = []
thread = threading.Thread(target=lambda: found.append(deep(5000)))
thread.start()
thread.join()
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    found += pool.map(abs, [-1])
assert found == [5000, 1]
assert given == open("/dev/stdin").read() == os.pread(0, 99, 0).decode() == "given\\n"
assert time.time() > time.perf_counter() >= 0
time.sleep(0)
assert datetime.datetime.now(datetime.timezone.utc).tzinfo and datetime.datetime.now().astimezone()
if "UTC" in zoneinfo.available_timezones():
    zoneinfo.ZoneInfo("UTC")
assert random.random() != random.SystemRandom().random() and len(os.urandom(8)) == 8
assert decimal.Decimal(2).sqrt() and hashlib.sha256(b"").digest() and math.comb(5, 2) == 10
assert "HONEST" not in os.environ and os.listdir(".") == [] and "import bisect" in open(__file__).read()
assert os.path.exists(__file__) and os.getcwd() and os.cpu_count() and not os.isatty(1)
signal.setitimer(signal.ITIMER_REAL, 0)
descriptor = os.dup(1)
os.set_inheritable(descriptor, True)
os.close(descriptor)
print("honest")
"""


def hide_calls(names: list[str]) -> None:
    """Makes the kernel look to this process and its children as if it had no such calls."""
    seccomp = ctypes.CDLL("libseccomp.so.2")
    seccomp.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(seccomp.seccomp_init(sandbox_child.ALLOW))
    for name in names:
        sandbox_child._add_rule(seccomp, rules, sandbox_child.REFUSE | errno.ENOSYS, name)
    if "seccomp" in names:  # which has a second name
        sandbox_child._add_rule(
            seccomp, rules, sandbox_child.REFUSE | errno.EINVAL, "prctl", (0, sandbox_child.WHOLE, 22)
        )
    assert seccomp.seccomp_load(rules) == 0


def state_of(path: Path) -> list[object]:
    """All that an attack might change of a file."""
    state = path.stat()
    rights = [state.st_mode, state.st_uid, state.st_gid, state.st_nlink]
    attributes = subprocess.run(["lsattr", str(path)], text=True, capture_output=True).stdout if LSATTR else None
    return [path.read_text(), state.st_mtime_ns, rights, os.listxattr(path), attributes]


def attack() -> dict[str, object]:
    """What the hostile program achieved."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        victim, secret = folder / "victim", folder / "secret"
        victim.write_text("whole")
        secret.write_text("secret")
        secret.chmod(0o600)
        with contextlib.suppress(OSError):  # a file system without them
            os.setxattr(victim, "user.kept", b"x")
        appended = stack.enter_context(victim.open("ab"))
        ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
        theirs.setblocking(False)
        os.set_inheritable(appended.fileno(), True)
        os.set_inheritable(ours.fileno(), True)
        key = str(10**6 + os.getpid())
        facts = {
            "parent": os.getpid(),
            "victim": str(victim),
            "folder": str(folder),
            "secret": str(secret),
            "open_files": [appended.fileno(), ours.fileno()],
            "key": key,
            "allowed": sandbox_child.ALLOWED,
        }
        before = state_of(victim)
        outcome = run_program(f"FACTS = {facts!r}\n{PROGRAM}")
        assert outcome.passed, outcome
        try:
            sent = theirs.recv(99).decode()
        except BlockingIOError:
            sent = ""
        return json.loads(outcome.output) | {
            "changed": [pair for pair in zip(before, state_of(victim), strict=True) if pair[0] != pair[1]],
            "files": sorted(os.listdir(folder)),
            "sent": sent,
            "queues": [str(path) for path in Path("/proc/sysvipc").glob("*") if key in path.read_text().split()],
            "honest": [*vars(run_program(HONEST, stdin="given\n")).values()],
            "dumpable": ctypes.CDLL(None).prctl(3, 0, 0, 0, 0),
        }


def refusal() -> dict[str, object]:
    """What is said where a program cannot be confined, and whether a program runs that is allowed to."""
    said = []
    for refused in (lambda: run_program("open('made', 'w')"), lambda: check_scorers(["humaneval"])):
        try:
            refused()
        except ValueError as error:
            said.append(str(error))
    check_scorers(["humaneval"], unsafe_code=True)
    outcome = run_program("print(6 * 7)", limits=Limits(unsafe_code=True))
    return {"said": said, "unsafe": outcome.output}


if __name__ == "__main__":
    missing = sys.argv[1].split(",") if len(sys.argv) > 1 else []
    if missing:
        hide_calls(missing)
    sys.stdout.write(json.dumps(refusal() if "seccomp" in missing else attack()))
