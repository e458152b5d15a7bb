"""A pytest plugin, `-p gpu_watchdog`: a test that runs longer than GPU_TEST_SECONDS (120) ends the run with every
thread's stack and an exit status of 1. A kernel that hangs cannot be interrupted from Python; its process can be ended.
A run in which no test passed, because none found a GPU, fails too.
"""

import faulthandler
import os

import pytest

SECONDS = float(os.environ.get("GPU_TEST_SECONDS", 120))
_STDERR = os.fdopen(os.dup(2), "w")  # before pytest captures it
_passed = set()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    faulthandler.dump_traceback_later(SECONDS, exit=True, file=_STDERR)
    yield
    faulthandler.cancel_dump_traceback_later()


def pytest_runtest_logreport(report):
    if report.when == "call" and report.passed:
        _passed.add(report.nodeid)


def pytest_sessionfinish(session, exitstatus):
    if exitstatus == 0 and not _passed:
        session.exitstatus = 1
