"""The engine ``command``: a program that reads a file of inputs and writes a file of outputs.

It is started without a shell, in a session and process group of its own; what it prints goes to standard error. The
group is killed when the program ends, whatever it started, when it takes too long, and when kdtr is interrupted.
"""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

from kdtr_cli.errors import EngineError, InputError
from kdtr_cli.workflows.engine_inputs import write_inputs
from kdtr_cli.workflows.engine_output import read_output
from kdtr_cli.workflows.engines import Answer, Question

__all__ = ["arguments", "command", "output_file", "run_program"]

#: What may stand behind {out}: np.savez, for one, adds its own where there is none.
SUFFIXES = ("", ".npz", ".safetensors", ".json")

_GRACE_S = 2.0  # from SIGTERM to SIGKILL
_POLL_S = 0.05
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


def command(argument: str, question: Question) -> Answer:
    """Run the program and read what it wrote; ``argument`` is the command line with {inputs}, {out} and {model}."""
    out = question.folder / "out"
    values = {"inputs": "", "out": str(out), "model": None if question.model is None else str(question.model)}
    arguments(argument, values)  # before a file is written
    values["inputs"] = str(write_inputs(question))
    words = arguments(argument, values)
    name = Path(words[0]).name
    if left := _outputs(out):
        raise EngineError(f"{left[0].name} is there before the engine ran; kdtr takes no output of another run")
    run_program(words, question.timeout)
    path = output_file(out, name)
    answer = read_output(path, question)
    return Answer(name, answer.sequences, answer.about)


def arguments(line: str, values: dict[str, str | None]) -> list[str]:
    """A command line as words, with its placeholders filled in.

    It is split first, by the shell's rules of quoting, so that a path with spaces stays one word.
    """
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise InputError(f"--engine command: {error} in {line!r}") from None
    if not words:
        raise InputError('--engine command: names no program; write command:"./my_engine {inputs} {out}"')
    used = {name for word in words for name in _PLACEHOLDER.findall(word)}
    if unknown := sorted(used - set(values)):
        known = ", ".join(f"{{{name}}}" for name in values)
        raise InputError(f"--engine command: no placeholder {{{unknown[0]}}}; there are {known}")
    for name in ("inputs", "out"):
        if name not in used:
            raise InputError(f'--engine command: {{{name}}} is missing; write command:"./my_engine {{inputs}} {{out}}"')
    if "model" in used and values["model"] is None:
        raise InputError("--engine command: {model} needs --model DIR: the golden holds no weights")
    return [_PLACEHOLDER.sub(lambda found: values[found[1]] or "", word) for word in words]


def run_program(words: list[str], timeout: float | None) -> None:
    """Run a program to its end. InputError: it can't be started. EngineError: it failed, or took too long."""
    name = Path(words[0]).name
    try:
        # its standard output is not ours, where results go: descriptor 2, which sys.stderr need not be
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)
    except (OSError, ValueError) as error:
        raise InputError(f"--engine command: {words[0]} can't be started: {_reason(error)}") from error
    ended = False
    try:
        ended = _wait(process.pid, timeout)
    finally:
        _end_group(process, ended)
    if not ended:
        raise EngineError(f"engine {name} did not end within {timeout:g} s (--timeout) and was killed")
    code = process.returncode
    if code < 0:
        raise EngineError(f"engine {name} was killed by {_signal_name(-code)}")
    if code:
        raise EngineError(f"engine {name} ended with exit code {code}")


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _wait(pid: int, timeout: float | None) -> bool:
    """Wait until the process has ended (True) or the time is up. It stays a zombie, so that its number, which is its
    group's too, can't be another's when the group is killed."""
    end = None if timeout is None else time.monotonic() + timeout
    pause = 0.001
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        left = pause if end is None else end - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, _POLL_S)
    return True


def _end_group(process: subprocess.Popen, ended: bool) -> None:
    """Kill what is left of the group; a program that runs still is asked first. Nothing outlives this call."""
    try:
        if not ended:
            _kill(process.pid, signal.SIGTERM)
            _wait(process.pid, _GRACE_S)
    finally:
        _kill(process.pid, signal.SIGKILL)
        process.wait()


def _kill(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _outputs(out: Path) -> list[Path]:
    paths = [out.with_name(out.name + suffix) for suffix in SUFFIXES]
    return [path for path in paths if path.is_symlink() or path.exists()]


def output_file(out: Path, name: str) -> Path:
    """The one file that an engine wrote to {out}, with or without an extension. EngineError: none, several, a link."""
    found = _outputs(out)
    if not found:
        raise EngineError(f"engine {name} ended well but wrote nothing to {{out}}")
    if len(found) > 1:
        raise EngineError(f"engine {name} wrote {' and '.join(path.name for path in found)}; one output is expected")
    if found[0].is_symlink() or not found[0].is_file():
        raise EngineError(f"engine {name} wrote no regular file to {{out}}")
    return found[0]
