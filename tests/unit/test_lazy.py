"""Libraries are imported by one thread of a process at a time."""

from __future__ import annotations

import subprocess
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


def test_a_driver_that_checks_a_configuration_has_no_torch(tmp_path):
    """It would cost a notebook's first cell seconds, and a driver memory for the whole run."""
    script = (
        "import sys\n"
        "from trinity_dask import Run, load_config\n"
        "words = ['+experiment=sort_digits', 'engine=torch', *sys.argv[1:]]\n"
        "run = Run(load_config(*words))\n"
        "assert 'running' not in repr(run)\n"
        "print(sorted({'torch', 'transformers', 'vllm'} & sys.modules.keys()))\n"
    )
    words = [f"checkpoint_root_dir={tmp_path}"]
    out = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=120
    )
    assert out.stdout.strip() == "[]", out.stdout + out.stderr
    wrong = [*words, "++stages.1.algorithm.policy_loss_fn_args.clip_rangge=0.1"]
    out = subprocess.run(
        [sys.executable, "-c", script, *wrong], capture_output=True, text=True, timeout=120
    )
    assert "clip_range" in out.stderr  # the names are checked all the same
    assert out.returncode != 0


def test_torch_that_is_imported_late_is_torch():
    import torch as real

    from trinity_dask.lazy import torch

    assert torch.nn.functional.softmax is real.nn.functional.softmax
    assert torch.float32 is real.float32
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = torch.no_such_name
