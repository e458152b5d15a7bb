"""`intarsia train`: it learns, stops on a signal, and continues as if it had not stopped."""

import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from intarsia.cli import data, main
from intarsia.cli.config import TrainConfig
from intarsia.cli.trainer import Trainer, config_of, learning_rate, read_checkpoint

TINY = {
    "steps": 6, "batch": 2, "context": 16, "layers": 2, "hidden": 16, "heads": 2, "width": 16, "experts": 4,
    "experts_per_token": 2, "tile": 8,
}  # fmt: skip
RESULTS = ("step", "loss", "balance_loss", "z_loss", "grad_norm", "lr", "tokens_per_expert")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    words = ["def ", "return ", "x = ", "(self)", ":\n    ", "import ", "1 + 1\n"]
    draw = random.Random(1)
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_text("".join(draw.choice(words) for _ in range(8000)))
    return path


def results(trainer: Trainer) -> list[tuple]:
    return [tuple(map(str, (r[k] for k in RESULTS))) for r in trainer.records()]


def options(out, path, **changes) -> list[str]:
    settings = {"text": path, "out": out, "device": "cpu", **TINY, **changes}
    return [part for name, value in settings.items() for part in ("--" + name.replace("_", "-"), str(value))]


def test_three_steps_write_everything(tmp_path, text, capsys):
    assert main(["train", *options(tmp_path, text, steps=3)]) == 0
    shown = capsys.readouterr().out
    for words in (
        "Held-out bits per byte: 8.000 before",
        "unigram",
        "Sample:\ndef ",
        "saved for backward",
        "planned MiB",
    ):
        assert words in shown
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in lines[:-1]] == [1, 2, 3]
    assert all(sum(layer) == 2 * 16 * 2 for r in lines[:-1] for layer in r["tokens_per_expert"])
    assert lines[-1]["end"]["before"] == pytest.approx(8.0)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert read_checkpoint(tmp_path)["step"] == 3


def test_planned_memory_is_measured_memory(tmp_path, text, capsys):
    for save in ("preactivation", "input"):
        assert main(["train", *options(tmp_path, text, steps=1, save=save)]) == 0
        table = [line.rsplit(maxsplit=2) for line in capsys.readouterr().out.splitlines() if line.startswith("  saved")]
        assert table
        assert all(planned == measured for _, planned, measured in table)


def test_learns_more_than_byte_frequencies(tmp_path, text):
    config = TrainConfig(**TINY | {"text": str(text), "steps": 120, "batch": 8, "hidden": 32, "lr": 1e-2})
    trainer = Trainer(config, data.load_corpus(str(text), config.context), tmp_path)
    assert trainer.train() == 0
    _, targets = trainer.held_out()
    assert trainer.evaluate() < 0.8 * data.unigram_bits(trainer.corpus.train, targets)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"router": "softmax", "save": "input"},
        {"router": "sigmoid_group", "dtype": "bfloat16"},
        {"router": "sigmoid"},
        {"router": "rounded", "rounding": "stochastic"},
    ],
    ids=lambda c: c.get("router", "default"),
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_interrupted_and_resumed_is_bit_equal(tmp_path, text, changes, number):
    config = TrainConfig(**TINY | {"text": str(text)} | changes)
    corpus = data.load_corpus(str(text), config.context)
    whole = Trainer(config, corpus, tmp_path / "whole")
    assert whole.train() == 0

    def interrupt(record: dict) -> None:
        if record["step"] == 3:
            os.kill(os.getpid(), number)

    first = Trainer(config, corpus, tmp_path / "parts")
    handler = signal.getsignal(signal.SIGINT)  # ignored where the tests run in the background
    assert first.train(interrupt) == number
    assert first.step == 3
    assert signal.getsignal(signal.SIGINT) is handler

    state = read_checkpoint(tmp_path / "parts")
    assert config_of(state) == config
    torch.manual_seed(12345)  # the checkpoint's state must win
    second = Trainer(config, corpus, tmp_path / "parts")
    second.load(state)
    assert second.train() == 0
    assert results(second) == results(whole)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name


def test_command_line_interrupts_and_resumes(tmp_path, text):
    """The process itself: Ctrl-C, exit status 130, and the command it names continues."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    command = [sys.executable, "-m", "intarsia", "train"]
    subprocess.run([*command, *options(whole, text, steps=40)], check=True, capture_output=True)
    process = subprocess.Popen([*command, *options(parts, text, steps=40)], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step 4:"):
            process.send_signal(signal.SIGINT)
            break
    rest = process.stdout.read()
    assert process.wait() == 130
    assert f"intarsia train --resume {parts}" in rest
    assert read_checkpoint(parts)["step"] < 40
    subprocess.run([*command, "--resume", str(parts)], check=True, capture_output=True)

    def lines(folder) -> list[dict]:
        found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [{k: r[k] for k in RESULTS} for r in found if "step" in r]

    assert lines(parts) == lines(whole)


def test_token_rounding_is_reported_beside_top_k(tmp_path, text, capsys):
    assert main(["train", *options(tmp_path, text, steps=2, router="rounded")]) == 0
    assert "trained with token rounding" in capsys.readouterr().out
    rounded = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][:-1]
    assert all(count % 8 == 0 for r in rounded for layer in r["tokens_per_expert"] for count in layer)
    assert config_of(read_checkpoint(tmp_path / "top-k")).router == "softmax"


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--steps", "7"], "steps: expected 6"),
        (["--out", "elsewhere"], "where the resumed run is"),
    ],
)
def test_a_resumed_run_is_not_contradicted(tmp_path, text, capsys, extra, words):
    config = TrainConfig(**TINY | {"text": str(text)})
    Trainer(config, data.load_corpus(str(text), config.context), tmp_path).save()
    assert main(["train", "--resume", str(tmp_path), *extra]) == 2
    assert words in capsys.readouterr().err


def test_a_changed_text_is_refused(tmp_path, text):
    config = TrainConfig(**TINY | {"text": str(text)})
    corpus = data.load_corpus(str(text), config.context)
    Trainer(config, corpus, tmp_path).save()
    with pytest.raises(ValueError, match="another one"):
        Trainer(config, replace(corpus, sha256="0"), tmp_path).load(read_checkpoint(tmp_path))


def test_a_cut_line_of_metrics_is_dropped(tmp_path, text):
    config = TrainConfig(**TINY | {"text": str(text), "steps": 2})
    trainer = Trainer(config, data.load_corpus(str(text), config.context), tmp_path)
    trainer.train()
    with trainer.metrics.open("a") as log:
        log.write('{"step": 3, "lo')
    assert [r["step"] for r in trainer.records()] == [1, 2]


def test_learning_rate_is_a_function_of_step_and_total():
    rates = [learning_rate(s, 50, 1.0) for s in range(50)]
    assert rates[4] == max(rates) == 1.0
    assert rates[:5] == sorted(rates[:5])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert 0.1 <= rates[-1] < 0.11


def test_held_out_bytes_are_not_trained_on(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(i % 251 for i in range(40_000)))
    corpus = data.load_corpus(str(path), 32)
    assert len(corpus.train) + len(corpus.held_out) == 40_000
    assert len(corpus.held_out) == 2000
    assert torch.equal(corpus.held_out, torch.tensor([i % 251 for i in range(38_000, 40_000)], dtype=torch.uint8))


def test_batches_depend_on_seed_and_step_alone():
    text = torch.arange(1000).remainder(256).to(torch.uint8)
    draw = {"batch": 4, "context": 10}
    inputs, targets = data.batch(text, 7, seed=1, **draw)
    again, _ = data.batch(text, 7, seed=1, **draw)
    assert torch.equal(inputs, again)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert not torch.equal(inputs, data.batch(text, 8, seed=1, **draw)[0])
    assert not torch.equal(inputs, data.batch(text, 7, seed=2, **draw)[0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text": "/nowhere"}, "does not exist"),
        ({"context": 5000}, "longer text"),
        ({"experts_per_token": 5}, "at most experts = 4"),
        ({"heads": 3}, "multiple of"),
        ({"steps": 0}, "at least 1"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, text, capsys, changes, words):
    assert main(["train", *options(tmp_path, text, **changes)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1
