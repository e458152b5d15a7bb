"""The training loop: schedule, one step, evaluation, checkpoints that resume bit for bit."""

import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import losses
from . import data
from .config import TrainConfig
from .model import ByteTransformer

BALANCE_WEIGHT = 0.05  # of load_balance_loss; five times OLMoE's, since hundreds of steps must be enough
Z_WEIGHT = 0.001  # of z_loss, as in ST-MoE and OLMoE
BIAS_RATE = 0.01  # of sigmoid_group's correction bias; ten times DeepSeek-V3's, for runs of hundreds of steps
WARM_UP = 0.1  # share of all steps
HELD_OUT_WINDOWS = 64
SAVE_EVERY = 100  # steps


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then a cosine to a tenth of `peak`: of `step` (from 0) and the total alone."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return peak * (step + 1) / warm
    progress = (step - warm) / max(1, steps - warm)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


@contextmanager
def interruptible() -> Iterator[Callable[[], int]]:
    """Within it SIGINT and SIGTERM are noted instead of obeyed: the given function returns the signal's number, or 0.

    A second signal has its usual effect at once.
    """
    received = [0]
    previous = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, _frame: object) -> None:
        received[0] = number
        for s, handler in previous.items():
            signal.signal(s, handler)

    for s in previous:
        signal.signal(s, note)
    try:
        yield lambda: received[0]
    finally:
        for s, handler in previous.items():
            signal.signal(s, handler)


class Trainer:
    """One run in one folder: metrics.jsonl (a line per step) and checkpoint.pt."""

    def __init__(self, config: TrainConfig, corpus: data.Corpus, out: Path) -> None:
        self.config, self.corpus, self.out = config, corpus, out
        torch.manual_seed(config.seed)
        self.model = ByteTransformer(config).to(config.device)
        # Matrices decay, vectors do not.
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        plain = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)
        self.step = 0
        self.before: float | None = None  # held-out bits per byte of the untrained model
        self.seconds = 0.0  # of training, over all sessions

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.pt"

    @property
    def metrics(self) -> Path:
        return self.out / "metrics.jsonl"

    def precision(self):
        """Autocast to bfloat16 when the run asks for it; parameters and optimizer stay float32."""
        if self.config.dtype == "bfloat16":
            return torch.autocast(torch.device(self.config.device).type, torch.bfloat16)
        return nullcontext()

    # ------------------------------------------------------------------------------------------------------- the loop

    def train(self, on_step: Callable[[dict], None] = lambda record: None) -> int:
        """Trains to the last step. Returns 0, or the number of the signal that stopped it after a saved step."""
        self.out.mkdir(parents=True, exist_ok=True)
        self._trim_metrics()
        if self.before is None:
            self.before = self.evaluate()
        with interruptible() as signalled, self.metrics.open("a") as log:
            while self.step < self.config.steps and not signalled():
                record = self.train_step()
                log.write(json.dumps(record) + "\n")
                log.flush()
                on_step(record)
                if self.step % SAVE_EVERY == 0:
                    self.save()
            self.save()
            return signalled() if self.step < self.config.steps else 0

    def train_step(self) -> dict:
        """One optimizer step; returns its line of metrics.jsonl."""
        c, start = self.config, time.perf_counter()
        inputs, targets = self._batch(self.step)
        rate = learning_rate(self.step, c.steps, c.lr)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        with self.precision():
            logits, routings = self.model(inputs)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        kind = self.model.blocks[0].experts.scores
        balance = torch.stack([losses.load_balance_loss(r.logits, r.ids, scores=kind) for r in routings]).mean()
        z = torch.stack([losses.z_loss(r.logits) for r in routings]).mean()
        (loss + BALANCE_WEIGHT * balance + Z_WEIGHT * z).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        for block in self.model.blocks:
            if block.experts.expert_bias is not None:
                block.experts.update_expert_bias(BIAS_RATE)
        self.step += 1
        seconds = time.perf_counter() - start
        self.seconds += seconds
        return {
            "step": self.step,
            "loss": loss.item(),
            "bits_per_byte": data.bits(loss.item()),
            "balance_loss": balance.item(),
            "z_loss": z.item(),
            "grad_norm": norm.item(),
            "lr": rate,
            "tokens_per_second": inputs.numel() / seconds,
            "tokens_per_expert": [b.experts.last_counts.tolist() for b in self.model.blocks],
        }

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        c = self.config
        inputs, targets = data.batch(self.corpus.train, step, seed=c.seed, batch=c.batch, context=c.context)
        return inputs.to(c.device), targets.to(c.device)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Bits per byte of the held-out windows, routed by top-k."""
        self.model.eval()
        c = self.config
        inputs, targets = self.held_out()
        total = 0.0
        for i in range(0, len(inputs), c.batch):
            with self.precision():
                logits, _ = self.model(inputs[i : i + c.batch].to(c.device))
            wanted = targets[i : i + c.batch].flatten().to(c.device)
            total += F.cross_entropy(logits.float().flatten(0, 1), wanted, reduction="sum").item()
        return data.bits(total / targets.numel())

    def held_out(self) -> tuple[Tensor, Tensor]:
        return data.held_out_windows(self.corpus.held_out, context=self.config.context, limit=HELD_OUT_WINDOWS)

    # --------------------------------------------------------------------------------------------------- checkpoints

    def save(self) -> None:
        """Writes checkpoint.pt whole or not at all."""
        state = {
            "config": asdict(self.config),
            "corpus_sha256": self.corpus.sha256,
            "step": self.step,
            "before": self.before,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
        }
        part = self.checkpoint.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, self.checkpoint)

    def load(self, state: dict) -> None:
        """Continues from a checkpoint of the same run. ValueError when the text has changed since."""
        if state["corpus_sha256"] != self.corpus.sha256:
            raise ValueError(
                f"resume: expected the text that the checkpoint was trained on, got another one in {self.corpus.name}; "
                "resume with the old text or start a new run without --resume"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        self.step, self.before, self.seconds = state["step"], state["before"], state["seconds"]

    def _trim_metrics(self) -> None:
        """Drops lines of steps that the checkpoint does not have: they will be done again."""
        kept = [r for r in self.records() if r["step"] <= self.step]
        self.metrics.write_text("".join(json.dumps(r) + "\n" for r in kept))

    def records(self) -> list[dict]:
        """The lines of metrics.jsonl that are steps; a line cut short by a crash is none."""
        lines = self.metrics.read_text().split("\n") if self.metrics.exists() else []
        return [r for r in map(json.loads, lines[:-1]) if "step" in r]

    def log_end(self, summary: dict) -> None:
        """Adds the last line of metrics.jsonl: {"end": summary}."""
        with self.metrics.open("a") as log:
            log.write(json.dumps({"end": summary}) + "\n")


def read_checkpoint(path: Path) -> dict:
    """A checkpoint's contents; `path` is the file or the folder that holds it. ValueError when there is none."""
    file = path / "checkpoint.pt" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"resume: expected a checkpoint, got {str(path)!r}, where there is none; start a run without --resume"
        )
    return torch.load(file, map_location="cpu", weights_only=True)


def config_of(state: dict) -> TrainConfig:
    """The configuration a checkpoint was written with."""
    return TrainConfig(**state["config"])
