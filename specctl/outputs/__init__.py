"""Outputs of a command: opened, locked and checked before its work begins, by one rule.

An output is never one of the inputs, nor another output. A file with content is replaced only with ``--force``, unless
the command continues it; pipes, devices and standard output hold nothing to lose. Earlier content stays until the work
begins (`OutputFile.begin`). One process at a time writes an output. A write is made whole or not at all, and an error
names the file.
"""

from specctl.outputs.command_outputs import Outputs
from specctl.outputs.file import OutputFile, Sink, naming, write_whole

__all__ = ["OutputFile", "Outputs", "Sink", "naming", "write_whole"]
