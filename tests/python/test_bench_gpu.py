"""The benchmark of the GPU side, as far as it needs no GPU: rows, merging, tables, kernels' names, verdicts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import gpu  # noqa: E402
import gpu_kernels  # noqa: E402
import gpu_layers  # noqa: E402
import gpu_results  # noqa: E402
import gpu_routing  # noqa: E402
import gpu_targets  # noqa: E402
import gpu_timing  # noqa: E402
from gpu_layers import Sizes  # noqa: E402


def row(shape="olmoe", system="intarsia", forward=1.0, backward=2.0, activation="swiglu", **fields):
    return {
        "shape": shape, "system": system, "activation": activation, "forward_ms": forward, "backward_ms": backward,
        "held_bytes": None, "peak_bytes": None, "planned_peak_bytes": None, "relative_error": None,
    } | fields  # fmt: skip


# ---- rows and files


def test_merge_replaces_what_was_measured_again_and_keeps_the_rest(tmp_path):
    old = [
        row(forward=9.0),
        row(activation="silu"),
        row(system="liger"),
        {"name": "skew", "shape": "olmoe", "case": "zipf"},
    ]
    new = [row(forward=1.0), {"name": "skew", "shape": "olmoe", "case": "uniform"}]
    kept = gpu_results.merge(new, old)
    assert len(kept) == 5
    assert [r["forward_ms"] for r in kept if r.get("system") == "intarsia" and r["activation"] == "swiglu"] == [1.0]

    gpu_results.write(tmp_path / "a.json", {"command": "first"}, old)
    earlier = json.loads((tmp_path / "a.json").read_text())
    gpu_results.write(tmp_path / "b.json", {"command": "second"}, new, earlier)
    written = json.loads((tmp_path / "b.json").read_text())
    assert written["rows"] == kept
    assert (written["command"], written["merged"]) == ("second", [{"command": "first"}])


def test_default_path_is_named_after_device_and_date():
    assert gpu_results.default_path("NVIDIA H200", "2030-01-02").name == "h200-2030-01-02.json"


def test_table_sets_each_row_against_its_own_bound():
    rows = [
        row(system="cublas_bmm_bound", forward=0.9, backward=1.5),
        row(held_bytes=3 << 20, peak_bytes=5 << 20, relative_error=3.8e-3),
        row(activation="silu"),
    ]
    lines = gpu_results.table(rows).splitlines()
    assert len(lines) == 4
    assert "0.900 / 0.750" in lines[2]
    assert lines[2].split()[-3:] == ["3.0", "5.0", "3.8e-03"]
    assert "/" not in lines[3]  # no bound of silu


def test_guard_reports_and_goes_on(capsys):
    guard = gpu_results.Guard()
    assert guard("fine", lambda: 3) == 3
    assert guard.status() == 0
    assert guard("broken", lambda: 1 / 0) is None
    assert guard.status() == 1
    assert "broken: ZeroDivisionError: division by zero" in capsys.readouterr().err


def test_interleaved_takes_turns_and_drops_who_fails(monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    calls = []

    def contender(name, *pairs):
        found = iter(pairs)

        def timed():
            calls.append(name)
            return next(found)

        return timed

    contenders = {
        "a": contender("a", (1, 10), (3, 30), (2, 20)),
        "b": contender("b", (5, 50)),  # fails in its second round
        "c": contender("c", (7, 70), (7, 70), (8, 80)),
    }
    guard = gpu_results.Guard()
    assert gpu_timing.interleaved(contenders, 3, guard, "shape") == {"a": (2, 20), "c": (7, 70)}
    assert calls == ["a", "b", "c", "b", "c", "a", "c", "a"]
    assert guard.failures == ["shape b"]


def test_segments_cuts_at_the_marks_and_drops_what_is_outside():
    marks = [(start, "at::cuda::spin_kernel(long)", 0.1) for start in (1, 6, 7)]
    events = [*marks, (0, "early", 9.0), (5, "b", 2.0), (2, "a", 1.0), (8, "late", 9.0)]
    assert gpu_timing.segments(events) == [[("a", 1.0), ("b", 2.0)], []]


# ---- arguments and systems


def test_arguments():
    parsed = gpu.parse(["--shapes", "olmoe,mixtral", "--activation", "swiglu,silu"])
    assert (parsed.shapes, parsed.activation, parsed.systems) == (["olmoe", "mixtral"], ["swiglu", "silu"], None)
    with pytest.raises(SystemExit):
        gpu.parse(["--shapes", "olmo"])
    with pytest.raises(SystemExit):
        gpu.parse(["--systems", "sonic"])


def test_every_shape_has_sizes_and_a_required_fraction():
    assert len(gpu.SHAPES) == 17
    assert set(gpu.SHAPES) == set(gpu_targets.FRACTIONS)
    assert all(Sizes.of(shape).T > 0 for shape in gpu.SHAPES)
    assert gpu.default_shapes("silu") == list(gpu_targets.BLAZE)
    assert gpu.usable(["cublas_bmm_bound", "intarsia", "sonicmoe"], "silu") == ["cublas_bmm_bound", "intarsia"]


def test_what_cannot_be_imported_is_named():
    assert gpu_layers.System(None, ("torch", "no_such_module")).missing() == ["no_such_module"]


@pytest.mark.parametrize("activation", ["swiglu", "silu"])
@pytest.mark.parametrize("system", ["intarsia", "mb_like"])
def test_layers_agree_with_the_reference(system, activation):
    s = Sizes(T=96, H=32, I=24, E=5, K=2)
    up = s.I * (2 if activation == "swiglu" else 1)
    shapes = ((s.T, s.H), (s.E, s.H), (s.E, up, s.H), (s.E, s.H, s.I))
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    forward, backward = gpu_layers.passes(
        gpu_layers.SYSTEMS[system].make(s.K, activation), leaves, torch.randn(s.T, s.H)
    )
    y = forward()
    expected = gpu.reference(*leaves, s.K, activation, alternating=False)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    for got, want in zip(backward(y), backward(expected), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_reference_with_alternating_rows():
    x, w_router, w_up, w_down = torch.randn(9, 8), torch.randn(3, 8), torch.randn(3, 12, 8), torch.randn(3, 8, 6)
    halves = torch.cat([w_up[:, ::2], w_up[:, 1::2]], 1)
    got = gpu.reference(x, w_router, w_up, w_down, 2, "swiglu", alternating=True)
    torch.testing.assert_close(got, gpu.reference(x, w_router, halves, w_down, 2, "swiglu", alternating=False))


def test_clear_choices_survive_rounding():
    x, w = torch.randn(4000, 64), torch.randn(48, 64) / 8
    token = gpu.clear_choices(x, w, 6)
    assert 0 < len(token) < 4000
    logits = x[token] @ w.T
    exact, rounded = (values.topk(6, -1).indices.sort(-1).values for values in (logits, logits.bfloat16().float()))
    assert torch.equal(exact, rounded)
    assert len(gpu.clear_choices(x, w, 48)) == 4000


def test_planned_peak_grows_with_what_is_kept():
    small, large = (gpu.planned_peak(Sizes(tokens, 512, 256, 16, 4), "swiglu") for tokens in (1000, 2000))
    held = 4 * 4000 * 256 + 20 * 4000
    assert held < small < large


@pytest.mark.parametrize("kind", gpu_routing.ROUTINGS)
def test_skewed_routings(kind):
    s = Sizes(T=3000, H=0, I=0, E=20, K=3)
    ids = gpu_routing.skewed_ids(kind, s, torch.Generator().manual_seed(1))
    assert ids.shape == (3000, 3)
    assert all(len(set(chosen)) == 3 for chosen in ids[:200].tolist())
    counts = torch.bincount(ids.flatten(), minlength=20).sort(descending=True).values.tolist()
    if kind == "uniform":
        assert counts[0] < 1.3 * counts[-1]
    if kind == "zipf":
        assert counts[0] > 4 * counts[-1] > 0
    if kind == "one expert":
        assert counts[0] == 3000
        assert counts[1] < 1.3 * counts[-1]
    if kind == "empty experts":
        assert counts[-3:-1] != [0, 0]
        assert counts[-2:] == [0, 0]


# ---- kernels' names

_SM90 = (
    "void intarsia::cuda::sm90::gemm_kernel<intarsia::cuda::sm90::Operands<__nv_bfloat16, "
    "intarsia::cuda::sm90::GemmConfig{{128, 256, 4, false, 1, 2, 2}}, (intarsia::cuda::sm90::Left){}, "
    "(intarsia::cuda::sm90::Right){}, (intarsia::cuda::sm90::Halves){}>, intarsia::cuda::sm90::{}<"
    "intarsia::cuda::sm90::Operands<__nv_bfloat16, intarsia::cuda::sm90::GemmConfig{{128, 256, 4, false, 1, 2, 2}}, "
    "(intarsia::cuda::sm90::Left){}, (intarsia::cuda::sm90::Right){}, (intarsia::cuda::sm90::Halves){}>{}> >"
    "(intarsia::cuda::sm90::GemmArguments<intarsia::cuda::sm90::Operands<__nv_bfloat16> >)"
)


@pytest.mark.parametrize(
    ("operation", "operands", "epilogue", "rest"),
    [
        ("up_forward", (0, 0, 1), "UpEpilogue", ", intarsia::Swiglu, true"),
        ("down_forward", (1, 0, 0), "StoreEpilogue", ", true"),
        ("down_backward", (0, 1, 0), "DownBackwardEpilogue", ", intarsia::Swiglu"),
        ("down_weight_backward", (2, 2, 0), "WeightEpilogue", ", false"),
        ("up_weight_backward", (2, 2, 0), "WeightEpilogue", ", true"),
        ("up_weight_backward", (2, 2, 4), "WeightEpilogue", ", false"),
        ("router_logits", (1, 0, 0), "LogitsEpilogue", ""),
        ("float32 weight gradient (the router's too)", (2, 2, 4), "FloatWeightEpilogue", ", true"),
        ("up_backward", (1, 1, 0), "StoreEpilogue", ", true"),
        ("up_backward", (1, 1, 2), "StoreEpilogue", ", true"),
    ],
)
def test_kernels_are_called_by_their_operation(operation, operands, epilogue, rest):
    name = gpu_kernels.readable(_SM90.format(*operands, epilogue, *operands, rest))
    assert name.startswith(f"{operation} [128,256,4,false,1,2,2; ")


def test_other_kernels_lose_namespaces_and_parameters():
    names = {
        "void intarsia::cuda::(anonymous namespace)::combine_kernel<__nv_bfloat16, 8, 2>(intarsia::cuda::X, int)": (
            "combine_kernel<__nv_bfloat16, 8, 2>"
        ),
        "intarsia::cuda::scan_kernel(int*, int, int, int*)": "scan_kernel",
        "Memset (Device)": "Memset",
    }
    assert {name: gpu_kernels.readable(name) for name in names} == names


def test_listing_has_time_share_and_launches():
    parts = [[("a", 3.0), ("b", 0.5), ("b", 0.5)], [("c", 1.0)]] * 2
    lines = gpu_kernels.listing("olmoe intarsia", parts, 2).splitlines()
    assert lines[0] == "olmoe intarsia forward: 4.000 ms of kernels"
    assert lines[1].split() == ["3.000", "ms", "75.0%", "x", "1.0", "a"]
    assert lines[2].split() == ["1.000", "ms", "25.0%", "x", "2.0", "b"]
    assert lines[4].split()[-1] == "c"


# ---- verdicts


@pytest.mark.parametrize(
    ("measured", "required", "at_most", "expected"),
    [
        (0.95, 0.93, False, "met"),
        (0.93, 0.93, False, "met"),
        (0.92, 0.93, False, "within 2 %"),
        (0.90, 0.93, False, "short by 3.2%"),
        (190, 200, True, "met"),
        (203, 200, True, "within 2 %"),
        (250, 200, True, "short by 20.0%"),
        (None, 1, True, "not measured"),
    ],
)
def test_verdicts(measured, required, at_most, expected):
    assert gpu_targets.Figure(measured, required, at_most).verdict() == expected


def test_memory_has_no_tolerance():
    assert gpu_targets.Figure(1.01, 1.0, at_most=True, tolerance=0).verdict() == "short by 1.0%"


def line(text: str, *words: str) -> str:
    found = [x for x in text.splitlines() if all(w in x for w in words)]
    assert len(found) == 1, (words, found)
    return " ".join(found[0].split())


def test_report_on_made_up_rows():
    limit = gpu_targets.held_limit("sonic-7b")
    assert limit == 4 * 24576 * 8 * 256 + 20 * 24576 * 8 + 8 * 129 + 2 * 24576 * 128
    rows = [
        row("sonic-7b", "cublas_bmm_bound", 0.75, 1.40),
        row("sonic-7b", "intarsia", 1.0, 2.0, held_bytes=limit, peak_bytes=900, planned_peak_bytes=900),
        row("sonic-7b", "sonicmoe", 2.0, 2.5, peak_bytes=800),
        row("sonic-7b", "sonicmoe_kernels", 1.0, 1.9),
        row("sonic-7b", "torch_grouped_mm", 2.0, 4.0),
        row("mixtral", "intarsia", 20.0, 40.0),
        row("mixtral", "sonicmoe_kernels", 16.0, 35.0),
        row("blaze-conf1", "intarsia", 1, 1, "silu", held_bytes=6, peak_bytes=9),
        row("blaze-conf1", "mb_like", 2, 1, "silu", held_bytes=10, peak_bytes=10),
        {"name": "host_time", "case": "module", "forward_us": 150.0, "backward_us": 400.0},
        {"name": "skew", "shape": "mixtral", "case": "zipf", "ratio": 1.05},
        {"name": "skew", "shape": "mixtral", "case": "uniform", "ratio": 1.0},
        {"name": "few_tokens", "shape": "sonic-7b", "case": "T=256", "forward_ms": 0.1234},
    ]
    text = gpu_targets.report(rows)
    assert line(text, "against sonicmoe_kernels", "sonic-7b").endswith(">= 0.90 0.97 met")
    assert line(text, "against sonicmoe_kernels", "mixtral").endswith(">= 0.90 0.85 short by 5.6%")
    mean = (2.9 / 3 * 51 / 60) ** 0.5
    assert line(text, "geometric mean of 2 of 17").endswith(f">= 0.960 {mean:.3f} short by {1 - mean / 0.96:.1%}")
    assert line(text, "of the bound", "swiglu  ", "sonic-7b").endswith("0.750 / 0.700 met")
    assert line(text, "times as fast as torch_grouped_mm", "sonic-7b").endswith(">= 2.00 2.00 met")
    assert line(text, "held bytes over the promised, swiglu", "sonic-7b").endswith("1.000 met")
    assert line(text, "peak over the plan's", "sonic-7b").endswith("1.000 met")
    assert line(text, "peak over sonicmoe's", "sonic-7b").endswith("1.12 short by 11.1%")
    assert line(text, "against mb_like", "silu", "blaze-conf1").endswith(
        "1.50 / 0.60 / 0.90 met / short by 16.7% / met"
    )
    assert line(text, "host time", "module").endswith("150 / 400 met / short by 25.0%")
    assert line(text, "time per FLOP", "mixtral, zipf").endswith("<= 1.10 1.05 met")
    assert "reported: sonic-7b T=256: forward_ms 0.123" in text
    assert "not measured: against mb_like: speed, held, peak, swiglu, 7 places" in text
    assert "not measured: build_index" in text
    assert "mixtral, uniform" not in text


def test_targets_read_files_and_later_ones_win(tmp_path):
    for name, forward in (("a", 5.0), ("b", 1.0)):
        rows = [row("mixtral", "cublas_bmm_bound", 1.0, 1.0), row("mixtral", "intarsia", forward, 1.0)]
        gpu_results.write(tmp_path / f"{name}.json", {}, rows)
    command = [sys.executable, ROOT / "bench" / "gpu_targets.py", tmp_path / "a.json", tmp_path / "b.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert line(done.stdout, "of the bound", "mixtral").endswith("1.000 / 1.000 met")


# ---- the watchdog of `make gpu-test`


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("import time; time.sleep(60)", 1, "in test_it"),
        ("import pytest; pytest.skip()", 1, "1 skipped"),
        ("assert True", 0, "1 passed"),
    ],
)
def test_watchdog(tmp_path, body, status, said):
    (tmp_path / "test_it.py").write_text(f"def test_it():\n    {body}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "gpu_watchdog", "-p", "no:cacheprovider", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tools"), "GPU_TEST_SECONDS": "5"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=environment, cwd=tmp_path)
    assert done.returncode == status
    assert said in done.stdout + done.stderr
