"""The program of a follower process; its arguments are STORE RANK SIZE REPORTS.

REPORTS is a file descriptor for lines of JSON: status reports, and finally the reason of a failure. It exits when its
standard input closes.
"""

import json
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.errors import ModelError, SpecctlError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def main() -> None:
    store, rank, size, reports = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    threading.Thread(target=_end_with_leader, daemon=True).start()

    def say(what: str | dict[str, str]) -> None:
        os.write(reports, f"{json.dumps(what)}\n".encode())

    try:
        from specctl.models.sharding import Follower, ShardGroup, known_to_transformers

        def load(asked: "dict[str, Any]") -> "PreTrainedModel":
            from specctl.models.loading.model import read_share

            with known_to_transformers(rank, size):
                return read_share(asked)

        say("ready")
        group = ShardGroup(store, rank, size)
        Follower(load, say).follow(group.receive)
    except SpecctlError as error:
        say({"message": error.message, "hint": error.hint})
    except Exception as error:
        traceback.print_exc()
        say({"message": f"{type(error).__name__}: {error}", "hint": "Run the command again."})
    finally:
        os._exit(ModelError.exit_code)  # exit at once, even if a pass of this rank still waits


def _end_with_leader() -> None:
    while os.read(0, 1024):
        pass
    os._exit(0)
