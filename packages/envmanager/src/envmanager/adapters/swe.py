"""A software engineer's episode (`swe:any`, `swe:bank`): a small repository whose tests fail, tools to look, edit and
run, and a reward of 1 when the tests pass. Needs no extra; commands run inside bubblewrap.

Invariants:
- what the model runs sees the repository and no network, is bounded in time, memory and output, and leaves nothing
  (test_envmanager_swe.py::test_commands_are_boxed);
- the tests that decide are the original ones, whatever became of those in the repository
  (test_envmanager_swe.py::test_tests_cannot_be_talked_over).
"""

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from envmanager.adapters.repositories import NAMES, Repository, repository
from envmanager.backends.sandbox import boxed, bubblewrap
from envmanager.errors import InfrastructureError, UnknownEnv

OUTPUT_BYTES = 4000
MEMORY_BYTES = 1 << 30
PROCESSES = 256
TOOLS = """Tools, one each turn, the first line names it:
  ls                      the files
  read PATH               a file with line numbers
  edit PATH               then lines: <<<< old text ==== new text >>>>, each marker on a line of its own
  run COMMAND             a shell command in the repository
  test                    the tests
  submit                  the end: the reward is 1 if the original tests pass"""
EDIT = re.compile(r"<<<<\n(.*?)\n?====\n(.*?)\n?>>>>", re.DOTALL)


class SweEnv:
    """One repository in a folder of its own."""

    def __init__(self, name: str, max_steps: int, seconds: float, sandbox: bool) -> None:
        self.task = "swe"
        self._name = name
        self._max_steps = max_steps
        self._seconds = seconds
        self._sandbox = sandbox
        self._folder = Path(tempfile.mkdtemp(prefix="swe-"))
        self._steps = 0
        self._made: Repository

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._made = repository(self._name, seed or 0)
        self._steps = 0
        for path, text in self._made.files.items():
            (self._folder / path).write_text(text)
        task = f"The tests of this repository fail. Find the bug in {self._made.module} and repair it."
        return f"{task}\n{TOOLS}\n\n{self._ls()}", self._offer()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        verb, _, rest = action.strip().partition(" ") if "\n" not in action.strip() else _split(action.strip())
        if verb == "submit":
            passed = self._passes()
            return "The tests pass." if passed else "The tests fail.", float(passed), True, False, {"passed": passed}
        said = self._use(verb, rest.strip())
        out = self._steps >= self._max_steps
        reward = float(out and self._passes())
        return said, reward, False, out, self._offer()

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _use(self, verb: str, rest: str) -> str:
        match verb:
            case "ls":
                return self._ls()
            case "read":
                return self._read(rest)
            case "edit":
                return self._edit(*rest.partition("\n")[::2])
            case "run" if rest:
                return self._run(["sh", "-c", rest], self._folder)[1]
            case "test":
                return self._run([sys.executable, "-B", "-m", "unittest"], self._folder)[1]
        return f"No such tool.\n{TOOLS}"

    def _offer(self) -> dict[str, Any]:
        made = self._made
        right = f"edit {made.module}\n<<<<\n{made.wrong.splitlines()[0]}\n====\npass\n>>>>"
        return {
            "actions": ["ls", f"read {made.module}", f"read {made.tests}", "test", "run git status", right, "submit"]
        }

    def _ls(self) -> str:
        return "\n".join(sorted(str(p.relative_to(self._folder)) for p in self._folder.rglob("*") if p.is_file()))

    def _file(self, path: str) -> Path | None:
        """A file of the repository; not what a link leads out to."""
        file = (self._folder / path.strip()).resolve()
        return file if file.is_file() and file.is_relative_to(self._folder.resolve()) else None

    def _read(self, path: str) -> str:
        if (file := self._file(path)) is None:
            return f"There is no file {path!r}."
        lines = file.read_bytes()[:OUTPUT_BYTES].decode(errors="replace").splitlines()
        return "\n".join(f"{number:4} {line}" for number, line in enumerate(lines, 1))

    def _edit(self, path: str, body: str) -> str:
        file, change = self._file(path), EDIT.search(body)
        if file is None or change is None:
            return "Write: edit PATH, then lines <<<< old ==== new >>>>, of a file that exists."
        text = file.read_text(errors="replace")
        count = text.count(change[1]) if change[1] else 0
        if count != 1:
            return f"The old text is there {count} times; give one that is there once."
        file.write_text(text.replace(change[1], change[2]))
        return "Edited."

    def _passes(self) -> bool:
        """The original tests over the module as it is now, in a fresh folder."""
        with tempfile.TemporaryDirectory(prefix="swe-") as fresh:
            folder = Path(fresh)
            for path, text in self._made.files.items():
                (folder / path).write_text(text)
            module = self._file(self._made.module)
            (folder / self._made.module).write_bytes(module.read_bytes() if module is not None else b"")
            code, said = self._run([sys.executable, "-B", "-m", "unittest", "-v", self._made.tests[:-3]], folder)
            return code == 0 and bool(re.search(r"^OK$", said, re.MULTILINE))

    def _run(self, command: list[str], folder: Path) -> tuple[int, str]:
        """A command's exit code and the end of what it said. All that it started is gone then."""
        inner = boxed(command, folder) if self._sandbox else command
        environ = {"PATH": os.environ.get("PATH", ""), "HOME": "/tmp", "LANG": "C.UTF-8"}
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                inner,
                cwd=folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for limit, value in ((resource.RLIMIT_DATA, MEMORY_BYTES), (resource.RLIMIT_FSIZE, 64 << 20)):
                resource.prlimit(process.pid, limit, (value, value))
            try:
                code = process.wait(self._seconds)
            except subprocess.TimeoutExpired:
                code = -signal.SIGKILL
            finally:
                _end(process)
            size = output.seek(0, os.SEEK_END)
            output.seek(max(0, size - OUTPUT_BYTES))
            said = output.read().decode(errors="replace")
        return code, said + (
            f"\n[ended after {self._seconds:g} s]" if code == -signal.SIGKILL else f"\n[exit {code}]"
        )


def _split(action: str) -> tuple[str, str, str]:
    head, _, body = action.partition("\n")
    verb, _, rest = head.partition(" ")
    return verb, " ", f"{rest}\n{body}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Swe:
    """Makes the episodes of one project. `seconds` bound a command. `sandbox=false` runs commands without bubblewrap:
    only where the whole environment is in a sandbox already.
    """

    def __init__(self, name: str, *, max_steps: int = 30, seconds: float = 20.0, sandbox: bool = True) -> None:
        if name not in NAMES:
            raise UnknownEnv(f"swe:{name} is none of {', '.join(f'swe:{known}' for known in NAMES)}")
        if sandbox:
            try:
                bubblewrap()
            except InfrastructureError as error:
                raise UnknownEnv(f"swe:{name}: {error}, or say sandbox=false inside another sandbox") from error
        self._name = name
        self._options = (max_steps, seconds, sandbox)

    def __call__(self, key: str) -> SweEnv:
        return SweEnv(self._name, *self._options)
