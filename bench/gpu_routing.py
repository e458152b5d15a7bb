"""Measurements of routing: skewed loads, few tokens, token rounding, building the lists. See gpu_extra.py."""

import math
import statistics
from functools import partial

import torch

import intarsia
from gpu_layers import Sizes, inputs, intarsia_layer, passes
from gpu_results import Guard
from gpu_timing import interleaved, profiled, queued_ms, replay_ms, step_times

ROUTINGS = ("uniform", "zipf", "one expert", "empty experts")
TILE = 128  # rows of up_forward's tile


def row_text(row: dict) -> str:
    """A row as one line."""
    figures = [f"{name} {value:.4g}" for name, value in row.items() if isinstance(value, int | float)]
    return f"{row['name']:12} {row.get('shape', ''):11} {row.get('case', ''):22} {', '.join(figures)}"


# ---- skewed loads


def skewed_ids(kind: str, s: Sizes, generator: torch.Generator) -> torch.Tensor:
    """K distinct experts of each token, (T, K) int32, drawn by the experts' weights.

    uniform; zipf: the expert of rank r is r times less likely than the first; one expert: every token chooses one and
    the same expert, its others uniformly; empty experts: a tenth of the experts get nobody.
    """
    device = generator.device
    rank = torch.randperm(s.E, generator=generator, device=device)
    weight = torch.zeros(s.E, device=device)
    if kind == "zipf":
        weight = -(1.0 + rank).log()
    if kind == "one expert":
        weight = weight.masked_fill(rank == 0, 1e6)
    if kind == "empty experts":
        weight = weight.masked_fill(rank < math.ceil(s.E / 10), -1e6)
    noise = -torch.empty(s.T, s.E, device=device).exponential_(generator=generator).log()  # Gumbel's distribution
    return (weight + noise).topk(s.K, -1).indices.int()


def skew(guard: Guard):
    """Time of the experts under skewed loads over that under a uniform one: as many rows, as many FLOP."""
    for shape in ("sonic-7b", "qwen3-30b", "mixtral"):
        s = Sizes.of(shape)
        (x, _, w_up, w_down), dy = inputs(s)
        generator = torch.Generator("cuda").manual_seed(0)
        scores = torch.rand(s.T, s.K, device="cuda", generator=generator).requires_grad_()

        def experts(kind, x=x, scores=scores, w_up=w_up, w_down=w_down, s=s, generator=generator, dy=dy):
            ids = skewed_ids(kind, s, generator)
            return passes(lambda x, p, up, down: intarsia.moe_mlp(x, ids, p, up, down), [x, scores, w_up, w_down], dy)

        timed = {kind: partial(step_times, *experts(kind)) for kind in ROUTINGS}
        times = interleaved(timed, 3, guard, f"skew {shape}")
        for kind, (forward, backward) in times.items():
            row = {"name": "skew", "shape": shape, "case": kind, "forward_ms": forward, "backward_ms": backward}
            yield row | ({"ratio": (forward + backward) / sum(times["uniform"])} if "uniform" in times else {})


# ---- few tokens


def few_tokens(guard: Guard):
    """The whole layer where launches and weights are what takes time: queued steps, and replayed graphs."""
    eight_rows = Sizes(256, 1536, 256, 128, 4)
    cases = [(shape, tokens, Sizes.of(shape)) for shape in ("qwen3-30b", "sonic-7b") for tokens in (512, 4096)]
    for shape, tokens, s in [*cases, ("sonic-7b", 256, eight_rows)]:
        small = Sizes(tokens, s.H, s.I, s.E, s.K)
        leaves, dy = inputs(small)
        forward, backward = passes(intarsia_layer(small.K, "swiglu"), leaves, dy)
        row = {"name": "few_tokens", "shape": shape, "case": f"T={tokens} E={small.E} K={small.K}"}
        times = guard(f"{row['case']} queued", partial(step_times, forward, backward))
        row |= dict(zip(("forward_ms", "backward_ms"), times, strict=True)) if times else {}
        works = {"graph_forward_ms": forward, "graph_step_ms": lambda f=forward, b=backward: b(f())}
        replayed = {name: guard(f"{row['case']} {name}", partial(replay_ms, work)) for name, work in works.items()}
        yield row | {name: ms for name, ms in replayed.items() if ms is not None}


# ---- token rounding


def rounding(guard: Guard):
    """Token rounding against top-k, router included."""
    sizes = {"qwen3-next": Sizes.of("qwen3-next"), "rounding-256": Sizes(16384, 4096, 1024, 256, 4)}
    for shape, s in sizes.items():
        leaves, dy = inputs(s)

        def rounded(x, w_router, w_up, w_down, K=s.K):
            lists = intarsia.round_tokens(intarsia.router_logits(x, w_router), K, tile=TILE, rounding="nearest")
            return intarsia.moe_mlp(x, lists, None, w_up, w_down)

        layers = {"top_k": intarsia_layer(s.K, "swiglu"), "rounded": rounded}
        timed = {name: partial(step_times, *passes(layer, leaves, dy)) for name, layer in layers.items()}
        times = interleaved(timed, 3, guard, f"rounding {shape}")
        if len(times) < 2:
            continue
        with torch.no_grad():
            lists = intarsia.round_tokens(intarsia.router_logits(leaves[0], leaves[1]), s.K, tile=TILE)
        yield {
            "name": "rounding", "shape": shape, "case": f"T={s.T} H={s.H} I={s.I} E={s.E} K={s.K}",
            "top_k_ms": sum(times["top_k"]), "rounded_ms": sum(times["rounded"]),
            "speedup": sum(times["top_k"]) / sum(times["rounded"]),
            "rows_ratio": lists.expert_offsets[-1].item() / (s.T * s.K),
        }  # fmt: skip


# ---- the lists


def torch_lists(ids: torch.Tensor, experts: int):
    """sort, bincount and cumsum: the same lists but for slot_row."""
    flat = ids.flatten()
    order = torch.sort(flat, stable=True).indices
    return order, order // ids.shape[1], torch.bincount(flat, minlength=experts).cumsum(0)


def build_index(guard: Guard):
    """build_index against torch's own means, and from logits to lists, in microseconds.

    intarsia_us and logits_to_lists_us: replayed graphs, gaps included. torch_us: the sum of its kernels' times, since
    bincount waits for the GPU; torch_queued_us with that wait.
    """
    for T, E, K in ((32768, 128, 8), (32768, 512, 10)):
        case = f"T={T} E={E} K={K}"
        logits = torch.randn(T, E, device="cuda")
        ids = logits.topk(K, -1).indices

        def to_lists(logits=logits, E=E, K=K):
            chosen, _ = intarsia.route(logits, K, scores="softmax")
            intarsia.build_index(chosen, E)

        def torch_kernels(ids=ids, E=E):
            parts = profiled(lambda: torch_lists(ids, E), lambda _: None)
            return statistics.median(sum(ms for _, ms in part) for part in parts[::2])

        ours = ids.int()
        measured = {
            "intarsia_us": partial(replay_ms, partial(intarsia.build_index, ours, E)),
            "torch_us": torch_kernels,
            "torch_queued_us": partial(queued_ms, partial(torch_lists, ids, E)),
            "logits_to_lists_us": partial(replay_ms, to_lists),
        }
        found = {name: guard(f"build_index {case} {name}", work) for name, work in measured.items()}
        row = {"name": "build_index", "case": case} | {name: ms * 1e3 for name, ms in found.items() if ms is not None}
        if "intarsia_us" in row and "torch_us" in row:
            row["speedup"] = row["torch_us"] / row["intarsia_us"]
        yield row
