"""`intarsia doctor`: green on a sound installation, red with a remedy on a broken one."""

import json
import os
import subprocess
import sys

from intarsia import doctor
from intarsia.cli import main


def test_json_of_a_sound_installation(capsys):
    status = main(["doctor", "--json"])
    result = json.loads(capsys.readouterr().out)
    names = {c["name"] for c in result["checks"]}
    assert {"package", "core", "torch", "Python", "torch binding", "processor", "GPU", "layer self-test"} <= names
    assert result["ok"] == all(c["ok"] for c in result["checks"])
    assert status == (0 if result["ok"] else 1)
    assert next(c for c in result["checks"] if c["name"] == "layer self-test")["ok"]
    assert all(c["ok"] or c["fix"] for c in result["checks"])


def test_wrong_numbers_are_red(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "TOLERANCE", 0.0)
    assert main(["doctor"]) == 1
    assert "RED layer self-test" in capsys.readouterr().out


def test_a_failing_part_is_a_red_line_not_a_crash(capsys, monkeypatch):
    def broken():
        raise OSError("no such thing")

    monkeypatch.setattr(doctor, "_gpu", broken)
    assert main(["doctor", "--json"]) == 1
    line = next(c for c in json.loads(capsys.readouterr().out)["checks"] if c["name"] == "GPU")
    assert not line["ok"]
    assert "no such thing" in line["found"]


def test_module_version_and_help():
    for option, word in (("--version", "intarsia 0."), ("--help", "doctor")):
        done = subprocess.run([sys.executable, "-m", "intarsia", option], capture_output=True, text=True, check=True)
        assert word in done.stdout


def test_a_missing_core_is_a_red_line_and_no_traceback(tmp_path):
    """reports.md 111: an incomplete installation is named, with what to do."""
    environment = {**os.environ, "INTARSIA_LIBRARY_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "intarsia", "doctor", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    core = next(check for check in json.loads(done.stdout)["checks"] if check["name"] == "core")
    assert not core["ok"]
    assert "Install the package" in core["found"]
    assert core["fix"]
