"""Libraries are imported by one thread of a process at a time."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from trinity_dask.lazy import MODEL_LIBRARY, import_modules
from trinity_dask.models.tokenizer import load_tokenizer


def test_two_threads_that_import_a_cycle_see_whole_modules(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    # whoever begins with the second, while another is in the first, sees it without its end
    (tmp_path / "cycle_one.py").write_text(
        "import time\ntime.sleep(0.1)\nfrom cycle_two import value\nlast = 1\n"
    )
    (tmp_path / "cycle_two.py").write_text(
        "import time\nvalue = 2\ntime.sleep(0.5)\nfrom cycle_one import last\n"
    )
    errors = []

    def load(name):
        try:
            import_modules([name])
        except ImportError as error:
            errors.append(error)

    threads = [threading.Thread(target=load, args=(n,)) for n in ("cycle_two", "cycle_one")]
    for thread in threads:
        thread.start()
        while "cycle_two" not in sys.modules:
            time.sleep(0.001)
    for thread in threads:
        thread.join(30)
    assert errors == []
    assert sys.modules["cycle_two"].last == 1


def test_a_tokenizer_is_loaded_after_whoever_imports(monkeypatch):
    """In a worker whose earlier actor loads a model at the same moment."""
    seen = []
    monkeypatch.setattr("trinity_dask.models.tokenizer.import_modules", lambda n: seen.append(n))
    with pytest.raises(ValueError, match="no tokenizer"):
        load_tokenizer("nowhere")
    assert seen == [MODEL_LIBRARY[-1:]]
