"""A pytest plugin, `-p gpu_watchdog`: a test that runs longer than GPU_TEST_SECONDS (120) ends the run with every
thread's stack and an exit status of 1. A kernel that hangs cannot be interrupted from Python; its process can be ended.
"""

import faulthandler
import os

import pytest

SECONDS = float(os.environ.get("GPU_TEST_SECONDS", 120))
_STDERR = os.fdopen(os.dup(2), "w")  # before pytest captures it


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    faulthandler.dump_traceback_later(SECONDS, exit=True, file=_STDERR)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
