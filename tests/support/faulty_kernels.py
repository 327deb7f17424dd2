"""Makes kernels faulty, in this process or, as `sitecustomize`, in a child.

A child reads the faults, by the names of launchers, from the environment variable FAULTS (JSON).
"""

import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import time

MODULE = "electra_fast.kernels.launchers"


def faulty(launcher, fault):
    """Returns a launcher with a fault in its output, gradient, compilation, run or time."""
    calls = []

    def call(*args):
        import torch

        calls.append(1)
        if fault == "compile":
            raise AssertionError("CompilationError: at 12:4: cannot be compiled\n  more")
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGSEGV)
        if fault == "hang":
            time.sleep(1000)
        result = launcher(*args)
        outputs = list(result) if isinstance(result, tuple) else [result]
        y = outputs[0]
        with torch.enable_grad():
            if fault == "output":
                y = y + (1.01 * y - y).detach()
            elif fault == "gradient":
                y = 1.01 * y + (y - 1.01 * y).detach()
            elif fault == "element":
                at = torch.zeros_like(y).flatten()
                at[-1] = 0.1
                y = y + at.view(y.shape)
            elif fault == "nan":
                y = y + torch.full_like(y, float("nan"))
            elif fault == "random":
                y = y * (1 + 1e-6 * len(calls))
        return (y, *outputs[1:]) if isinstance(result, tuple) else y

    return call


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, faults):
        self.faults = faults

    def find_spec(self, name, path, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            for launcher, fault in self.faults.items():
                setattr(module, launcher, faulty(getattr(module, launcher), fault))

        spec.loader.exec_module = exec_module
        return spec


if "FAULTS" in os.environ:
    sys.meta_path.insert(0, _Finder(json.loads(os.environ["FAULTS"])))
