"""A peer for tests: a program that answers as peers' workers do, from a table of answers beside it, and misbehaves on
request.

`install` copies this file to a folder and makes it executable; there it reads

    answers.json    for the ids of each prompt, joined by blanks, the ids that follow
    behaviour       what to do instead of answering a run: die, hang, rubbish, error, wrong; nothing means to answer
    said            what it was asked, a line each, which it writes
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent


def install(folder: Path, answers: dict[str, list[int]] | None = None, behaviour: str = "") -> Path:
    """The program, in a folder that is made."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "peer"
    program.write_text(f"#!{sys.executable}\n{Path(__file__).read_text(encoding='utf-8')}", encoding="utf-8")
    program.chmod(0o755)
    (folder / "answers.json").write_text(json.dumps(answers or {}), encoding="utf-8")
    (folder / "behaviour").write_text(behaviour, encoding="utf-8")
    return program


def ended(pid: int) -> bool:
    """Whether a process that is not this one's child has gone, or is only waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def say(answer: object) -> None:
    print(json.dumps(answer), flush=True)


def run(question: dict[str, object], answers: dict[str, list[int]]) -> None:
    behaviour = (HERE / "behaviour").read_text(encoding="utf-8")
    if behaviour == "die":
        print("the model fell over", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "hang":
        time.sleep(600)
    if behaviour == "rubbish":
        print("here is your text", flush=True)
    if behaviour == "error":
        say({"error": "RuntimeError: out of cheese"})
    if behaviour in ("", "wrong"):
        found = []
        for prompt in question["batch"]:
            ids = answers[" ".join(map(str, prompt))][: question["most"]]
            ids = [*ids[:2], ids[2] + 1, *ids[3:]] if behaviour else ids
            counts = {"passes": len(ids), "drafted": 2 * len(ids)}
            found.append({"ids": ids, "seconds": 0.5, "first_seconds": 0.1, **counts, "arrivals": []})
        say({"batch": found})


def main() -> None:
    (HERE / "pid").write_text(str(os.getpid()), encoding="utf-8")
    say({"version": "1.2.3"})
    answers = json.loads((HERE / "answers.json").read_text(encoding="utf-8"))
    for line in sys.stdin:
        with (HERE / "said").open("a", encoding="utf-8") as said:
            said.write(line)
        question = json.loads(line)
        if question["do"] == "load":
            say({})
        else:
            run(question, answers)


if __name__ == "__main__":
    main()
