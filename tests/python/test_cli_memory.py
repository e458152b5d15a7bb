"""`intarsia memory`: the plan and the arithmetic of the peers, against formulas written out here."""

import json

import pytest

from intarsia import memory
from intarsia.cli import main
from intarsia.presets import PRESETS

MIB = 1 << 20


def memory_json(capsys, *options: str) -> dict:
    assert main(["memory", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_qwen3_30b(capsys):
    result = memory_json(capsys, "--preset", "qwen3-30b-a3b", "--tokens", "32768")
    T, H, I, E, K = 32768, 2048, 768, 128, 8
    R = T * K
    modes, peers = result["modes"], result["peers"]
    assert modes["preactivation"]["saved_bytes"] == 2 * T * H + 4 * R * I + 20 * R + 4 * (E + 1)
    assert modes["input"]["saved_bytes"] == 2 * T * H + 20 * R + 4 * (E + 1)
    for mode in modes.values():
        assert mode["peak_bytes"] > 0
        assert all({"name", "shape", "dtype", "bytes", "lifetime"} <= set(b) for b in mode["buffers"])
    assert {n: p["saved_bytes"] for n, p in peers.items()} == {
        "megablocks": 2 * T * H + 4 * R * H + 8 * R * I,
        "scattermoe": 2 * T * H + 2 * R * H + 8 * R * I,
        "megatron": 2 * T * H + 2 * R * H + 6 * R * I,
        "moeblaze": 2 * T * H + 6 * R * I,
        "sonicmoe": 2 * T * H + 781 * MIB,
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_logits_of_softmax_are_kept_in_16_bits(capsys, dtype):
    """olmoe: softmax without renormalisation. save="input", and float32, compute them again."""
    T, H, I, E, R = 4096, 2048, 1024, 64, 4096 * 8
    modes = memory_json(capsys, "--preset", "olmoe-1b-7b", "--tokens", "4096", "--dtype", dtype)["modes"]
    b = 4 if dtype == "float32" else 2
    held = b * T * H + 20 * R + 4 * (E + 1)
    assert modes["preactivation"]["saved_bytes"] == held + 2 * b * R * I + (2 * T * E if b == 2 else 0)
    assert modes["input"]["saved_bytes"] == held


def test_saved_bytes_are_the_sum_of_the_saved_buffers(capsys):
    for mode in memory_json(capsys, "--preset", "deepseek-v3", "--tokens", "4096")["modes"].values():
        assert mode["saved_bytes"] == sum(b["bytes"] for b in mode["buffers"] if b["kind"] == "saved")


def test_workspaces_are_those_of_the_device(capsys):
    options = ["--preset", "gpt-oss-20b", "--tokens", "64"]
    on_cpu, on_gpu = (memory_json(capsys, *options, "--device", device) for device in ("cpu", "cuda"))
    assert (on_cpu["backend"], on_gpu["backend"]) == ("cpu", "cuda")
    assert memory_json(capsys, *options)["backend"] == memory.backend_here()
    R, I, H, E = 64 * 4, 2880, 2880, 32
    for mode in ("preactivation", "input"):
        cpu, gpu = ({b["name"]: b for b in r["modes"][mode]["buffers"]} for r in (on_cpu, on_gpu))
        assert "scratch" in cpu
        assert "bias_sums" not in cpu
        assert gpu["rows"]["bytes"] == gpu["dx_rows"]["bytes"] == 2 * R * H
        assert gpu["bias_sums"]["bytes"] == 4 * (R // 128 + E) * 2 * I
        assert on_cpu["modes"][mode]["saved_bytes"] == on_gpu["modes"][mode]["saved_bytes"]


def test_plain_activation_and_other_sizes(capsys):
    options = ["--tokens", "100", "--hidden", "64", "--width", "32", "--experts", "5", "--experts-per-token", "2"]
    result = memory_json(capsys, *options, "--activation", "relu2", "--dtype", "float32")
    T, H, I, R = 100, 64, 32, 200
    assert result["peers"]["megablocks"]["saved_bytes"] == 2 * (2 * T * H + 4 * R * H + 4 * R * I)
    assert result["peers"]["moeblaze"]["saved_bytes"] == 2 * (2 * T * H + 4 * R * I)
    assert result["peers"]["sonicmoe"]["saved_bytes"] is None
    assert "not measured" in result["peers"]["sonicmoe"]["source"]


def test_sonicmoe_formula_agrees_with_what_was_measured():
    for name, held in memory._SONICMOE_HELD_MIB.items():
        p = PRESETS[name]
        R = p.tokens * p.experts_per_token
        formula = 4 * R * p.width + 20 * R + 2 * p.tokens * p.experts
        assert formula == pytest.approx(held * MIB, rel=2e-3)


def test_table_for_people(capsys):
    assert main(["memory", "--preset", "olmoe"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("row_token", "dx_rows", "megablocks", "measured on an H200", "preactivation"))


@pytest.mark.parametrize(
    "options", [["--preset", "nobody"], ["--hidden", "64"], ["--preset", "olmoe", "--activation", "swish"]]
)
def test_mistakes_are_one_sentence(capsys, options):
    assert main(["memory", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("intarsia: ")
    assert len(error.splitlines()) == 1
