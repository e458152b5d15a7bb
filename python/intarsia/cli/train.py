"""`intarsia train`: a byte-level MoE language model on real text, from one command."""

import argparse
import shlex
import sys
from dataclasses import fields, replace
from pathlib import Path

from .config import ROUNDINGS, ROUTERS, TrainConfig

_HELP = {
    "text": "a file or a directory (default: the sources of Python's standard library)",
    "steps": "optimizer steps; the schedule depends on their number",
    "batch": "sequences in a step",
    "context": "bytes in a sequence",
    "layers": "transformer blocks",
    "hidden": "model width H",
    "heads": "attention heads",
    "width": "intermediate width I of one expert",
    "experts": "experts E in every layer",
    "experts_per_token": "experts K that a token goes to",
    "router": 'router family, or "rounded": token rounding in training, beside the same run with top-k',
    "rounding": "with --router rounded: how a row count becomes a multiple of the tile",
    "tile": "with --router rounded: rows of a tile",
    "save": "what forward keeps for backward",
    "dtype": "of the activations; parameters are float32",
    "device": "auto: a CUDA GPU if this version has kernels for it, else the CPU",
    "lr": "peak learning rate",
    "seed": "of initial weights and data order",
}
_CHOICES = {
    "router": ROUTERS,
    "rounding": ROUNDINGS,
    "save": ("preactivation", "input"),
    "dtype": ("float32", "bfloat16"),
    "device": ("auto", "cpu", "cuda"),
}


def add_parser(commands) -> None:
    p = commands.add_parser(
        "train",
        help="train a byte-level MoE language model on real text",
        description="Trains a byte-level MoE transformer on real text and shows held-out bits per byte before and "
        "after, a sample, the memory of the layer and a plot. Ctrl-C saves; --resume continues with the same numbers, "
        "bit for bit.",
    )
    for field in fields(TrainConfig):
        default = "auto" if field.name == "device" else field.default
        shown = "" if default is None else f" (default: {default})"
        kind = str if default is None else type(default)
        # Without a default of its own the option is absent unless given: that tells --resume what was asked for.
        p.add_argument(
            "--" + field.name.replace("_", "-"),
            type=kind,
            choices=_CHOICES.get(field.name),
            default=argparse.SUPPRESS,
            metavar=None if field.name in _CHOICES else kind.__name__.upper(),
            help=_HELP[field.name] + shown,
        )
    p.add_argument("--out", type=Path, metavar="DIR", help="folder of metrics, checkpoint and plot (default: out)")
    p.add_argument(
        "--resume", type=Path, metavar="PATH", help="continue from a checkpoint, or from the one in this folder"
    )
    p.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Trains, or continues, one run; with --router rounded then the same run with top-k. 128 + n after signal n."""
    from .data import load_corpus
    from .trainer import Trainer, read_checkpoint

    config, out = _configure(arguments)
    corpus = load_corpus(config.text, config.context)
    train, held_out = len(corpus.train), len(corpus.held_out)
    say(f"Text: {corpus.name}, {corpus.files} files: {train:,} bytes to train on, {held_out:,} held out.")
    runs = [(config, out)]
    if config.router == "rounded":
        runs.append((replace(config, router="softmax"), out / "top-k"))
    finished = []
    for config, folder in runs:
        trainer = Trainer(config, corpus, folder)
        if arguments.resume and (folder / "checkpoint.pt").exists():
            trainer.load(read_checkpoint(folder))
        signalled = _train(trainer)
        if signalled:
            say(f"Interrupted at step {trainer.step} of {config.steps}; saved {trainer.checkpoint}.")
            say(f"Resume with: intarsia train --resume {shlex.quote(str(out))}")
            return 128 + signalled
        finished.append(_finish(trainer))
    if len(finished) > 1:
        rounded, top_k = finished
        say("\nHeld-out bits per byte, evaluated with top-k:")
        say(f"  trained with token rounding {rounded:.3f}, trained with top-k {top_k:.3f}")
    return 0


def say(text: str) -> None:
    """Prints at once, so that a log shows it in order."""
    print(text, flush=True)


def _configure(arguments: argparse.Namespace) -> tuple[TrainConfig, Path]:
    """The run's configuration and folder: from the options, or from a checkpoint that they must not contradict."""
    from .trainer import config_of, read_checkpoint

    names = [f.name for f in fields(TrainConfig)]
    given = {n: getattr(arguments, n) for n in names if hasattr(arguments, n)}
    if "text" in given:  # a resumed run may start in another folder
        given["text"] = str(Path(given["text"]).resolve())
    if not arguments.resume:
        device, note = choose_device(given.pop("device", "auto"))
        if note:
            say(note)
        return TrainConfig(**given, device=device), arguments.out or Path("out")
    path = arguments.resume
    config, folder = config_of(read_checkpoint(path)), path if path.is_dir() else path.parent
    if given.get("device") == "auto":
        del given["device"]
    for name, value in given.items():
        if value != getattr(config, name):
            raise ValueError(
                f"{name}: expected {getattr(config, name)!r}, as in the checkpoint, got {value!r}; resume without "
                f"--{name.replace('_', '-')}, or start a new run without --resume"
            )
    if arguments.out and arguments.out.resolve() != folder.resolve():
        raise ValueError(
            f"out: expected {str(folder)!r}, where the resumed run is, got {str(arguments.out)!r}; leave --out away"
        )
    return config, folder


def choose_device(asked: str) -> tuple[str, str]:
    """The device to run on, and a sentence for the user or ''."""
    import torch

    from .. import _c

    kernels = _c.doctor()["cuda_kernels"]
    missing = "This build of intarsia has no CUDA kernels (no nvcc when it was built)"
    if asked == "cuda" and not (kernels and torch.cuda.is_available()):
        why = f"{missing}; use --device cpu" if not kernels else "torch finds no CUDA GPU here; use --device cpu"
        raise ValueError(f"device: expected a device that can run the layer, got 'cuda'. {why}")
    if asked == "auto" and torch.cuda.is_available():
        return ("cuda", "") if kernels else ("cpu", f"{missing}: training on the CPU.")
    return ("cpu" if asked == "auto" else asked), ""


def _train(trainer) -> int:
    """Trains to the end under a progress bar; returns the signal that stopped it, or 0."""
    c = trainer.config
    total, active = trainer.model.parameters_of()
    say(
        f"Model: {c.layers} layers, H {c.hidden}, {c.experts} experts, width {c.width}, {c.experts_per_token} a byte; "
        f"{total:,} parameters, {active:,} of them for one byte; router {c.router}, {c.dtype}, {c.device}."
    )
    if not sys.stderr.isatty():  # a log: lines instead of a bar
        return trainer.train(_line_every(max(1, c.steps // 20)))
    try:
        from tqdm import tqdm
    except ImportError:
        say("No progress bar: tqdm is not installed (pip install tqdm).")
        return trainer.train(_line_every(max(1, c.steps // 20)))
    with tqdm(total=c.steps, initial=trainer.step, unit="step", dynamic_ncols=True) as bar:

        def show(record: dict) -> None:
            bar.set_postfix_str(_state(record), refresh=False)
            bar.update()

        return trainer.train(show)


def _line_every(steps: int):
    def show(record: dict) -> None:
        if record["step"] % steps == 0:
            say(f"step {record['step']}: {_state(record)}")

    return show


def _state(record: dict) -> str:
    worst = max(max(layer) * len(layer) / sum(layer) for layer in record["tokens_per_expert"])
    loss, speed = record["bits_per_byte"], record["tokens_per_second"]
    return f"loss {loss:.3f} bits/byte, {speed:,.0f} tokens/s, busiest expert {worst:.2f}x its share"


def _finish(trainer) -> float:
    """Evaluates and reports; returns held-out bits per byte."""
    from . import report
    from .data import unigram_bits

    after = trainer.evaluate()
    _, targets = trainer.held_out()
    unigram = unigram_bits(trainer.corpus.train, targets)
    results = {"before": trainer.before, "after": after, "unigram": unigram}
    trainer.log_end(results | {"seconds": trainer.seconds})
    say("")
    say(f"Held-out bits per byte: {trainer.before:.3f} before, {after:.3f} after; a unigram model: {unigram:.3f}.")
    say(f"Training took {trainer.seconds:.0f} s for {trainer.step} steps.")
    say("\nSample:\n" + report.sample(trainer, "def "))
    say("\n" + report.layer_memory(trainer))
    say("\n" + report.plot(trainer.records(), trainer.out / "plot.png", **results))
    say(f"Metrics: {trainer.metrics}\nCheckpoint: {trainer.checkpoint}")
    return after
