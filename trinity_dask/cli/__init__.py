"""The command line: ``trinity-dask <command> ...``.

Invariant: every command returns an exit code (0 done, 1 failed, 2 bad configuration or
usage, 130 interrupted) and says what is wrong in plain lines on stderr. A command's module,
and what it needs, is imported only when it is used.
"""

from __future__ import annotations

import importlib
import keyword
import signal
import sys
from collections.abc import Sequence
from typing import Optional

from trinity_dask import __version__
from trinity_dask.config.errors import EXIT_CODE, ConfigError, hint
from trinity_dask.config.secrets import shown_text

EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130

#: command -> what it is for; the module of that name (``-`` as ``_``, a keyword of Python with one
#: after it) here has ``main(args)``
COMMANDS = {
    "run": "run a job: presets and key=value overrides (Hydra)",
    "submit": "the same in a job of Slurm, which goes on in its next one",
    "try": "one task through its workflow, turn by turn, without a trainer",
    "validate": "check a configuration and show it, run nothing",
    "status": "what a run does (address) or how far it got (job directory)",
    "stop": "end a run on a scheduler, its state saved",
    "view": "look at jobs in their directories, in the browser",
    "samples": "show experiences of a job: prompt, response, reward",
    "worker": "add a worker to a running scheduler by hand",
    "convert": "checkpoints to Hugging Face directories (merges adapters)",
    "studio": "make a configuration in the browser, check it, run it",
    "import-trinity": "a configuration of Trinity-RFT as one of ours",
    "doctor": "versions, cores, GPUs, ports and disk of this machine",
}


class CommandError(RuntimeError):
    """A command that cannot do what was asked; the message is for the user."""


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run one command; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if argv is None:  # as Ctrl-C, until a command has handlers of its own
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.default_int_handler)
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if args[0] == "--version":
        print(f"trinity-dask {__version__}")
        return 0
    if args[0] not in COMMANDS:
        nearest = hint(args[0], list(COMMANDS))
        print(f"error: unknown command {args[0]!r}; {nearest}", file=sys.stderr)
        return EXIT_CODE
    try:
        name = args[0].replace("-", "_") + "_" * keyword.iskeyword(args[0])
        module = importlib.import_module(f"{__name__}.{name}")
        return int(module.main(args[1:]))
    except ConfigError as error:
        for line in shown_text(str(error)).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return EXIT_CODE
    except CommandError as error:
        print(f"error: {shown_text(str(error))}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def usage() -> str:
    """The commands, one per line, and where to go on."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: trinity-dask <command> ...",
            "",
            *lines,
            "",
            "trinity-dask run --help lists the presets; a first run is",
            "  trinity-dask run +experiment=sort_digits",
        ]
    )
