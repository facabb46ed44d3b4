"""Records which function of trinity_dask calls which, in every process of a run.

Python imports this module at the start of each process that has its folder on PYTHONPATH.
Invariant: each pair is written once per process, at once, so that a killed process loses
nothing; a nested function counts as the function it stands in.
"""

import os
import sys
import threading

FOLDER = os.environ.get("TRINITY_WALK_TRACE")
MARK = f"{os.sep}trinity_dask{os.sep}"


def install(folder):
    known, seen, own = {}, set(), {"pid": None, "file": -1}

    def name_of(code):
        if code not in known:
            _, found, inner = code.co_filename.rpartition(MARK)
            outer = code.co_qualname.split(".<locals>")[0]
            ours = found and not outer.startswith("<")
            known[code] = f"{inner.replace(os.sep, '/')}:{outer}" if ours else None
        return known[code]

    def write(line):
        if own["pid"] != os.getpid():  # also after a fork
            own["pid"] = os.getpid()
            path = os.path.join(folder, f"{own['pid']}.txt")
            own["file"] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(own["file"], line.encode())

    def profile(frame, event, argument):
        if event != "call" or (callee := name_of(frame.f_code)) is None:
            return
        above = frame.f_back
        while above is not None and name_of(above.f_code) in (None, callee):
            above = above.f_back
        caller = name_of(above.f_code) if above is not None else ""
        if (caller, callee) not in seen:
            seen.add((caller, callee))
            write(f"{caller} {callee}\n")

    threading.setprofile(profile)
    sys.setprofile(profile)


if FOLDER:
    install(FOLDER)
