"""The program that tries grammars, of which some take as much as their text says, or the title of their schema."""

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from specctl.models.running.grammars import trials


def maker(tokenizer: str, eos: list[int]) -> trials.Maker:
    library = trials.library_maker(tokenizer, eos)

    def make(asked: Mapping[str, str]) -> trials.Answer:
        text = asked["text"] if asked["kind"] != "json_schema" else json.loads(asked["text"]).get("title", "")
        word, _, path = text.partition(" ")
        if word == "works":  # for ever; its process writes its number down once it has the last of its tries
            if os.nice(0) == trials.NICE[-1]:
                Path(f"{path}.new").write_text(str(os.getpid()))
                os.replace(f"{path}.new", path)
            while True:
                pass
        if word == "slow":  # takes all the time that there is
            os.kill(os.getpid(), signal.SIGPROF)
        if word == "large":
            bytearray(1 << 40)
        if word == "fatal":
            os._exit(7)
        if word == "ends":
            os.kill(os.getppid(), signal.SIGKILL)
        return library(asked)

    return make


def gone(path: Path) -> bool:
    """Whether a process has ended that has written its number to a file, if one ever did."""
    try:
        os.kill(number := int(path.read_text()), 0)
    except (FileNotFoundError, ProcessLookupError):
        return True
    try:  # it may have ended without anybody who takes its status
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may end between the opening and the reading of the file
        return Path("/proc/self").exists()


def main() -> None:
    trials.SECONDS = (0.02, 0.05, 3600.0)
    trials.main(maker)
