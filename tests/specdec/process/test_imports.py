"""Imports of large packages, alone and in services that start."""

import gc
import importlib
import json
import subprocess
import sys

import pytest

from specdec.process.imports import large_imports
from tandem.checkpoints import TARGET, find_checkpoint

#: Runs a service whose model cannot be loaded; tells, as JSON, how often garbage was collected while transformers was
#: imported, and whether its modules are left out of later collections.
SERVICE = """
import atexit, gc, importlib, json, sys

FIRST, LAST = "torch", "transformers.modeling_utils"
collections = []

def count(phase, info):
    if phase == "start" and FIRST in sys.modules and LAST not in sys.modules:
        collections.append(info["generation"])

def report():
    left_out = all(each is not sys.modules[LAST] for each in gc.get_objects())
    print(json.dumps({"collections": len(collections), "left_out": left_out}))

gc.callbacks.append(count)
atexit.register(report)
sys.exit(importlib.import_module(sys.argv[1]).main(sys.argv[2:]))
"""


def test_garbage_is_collected_again_after_imports_that_fail():
    frozen = gc.get_freeze_count()
    with pytest.raises(ModuleNotFoundError), large_imports():
        importlib.import_module("no_such_module" if not gc.isenabled() else "sys")
    assert gc.isenabled()
    assert gc.get_freeze_count() > frozen
    gc.unfreeze()


@pytest.mark.parametrize("service", ["target", "draft"])
def test_a_service_imports_without_collecting_garbage(service):
    command = [sys.executable, "-c", SERVICE, f"{service}_service.main", "--model", find_checkpoint(TARGET)]
    command += ["--max-model-len", "99999999"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, "max_model_len is 99999999" in done.stderr) == (1, True), done.stderr
    assert json.loads(done.stdout) == {"collections": 0, "left_out": True}
