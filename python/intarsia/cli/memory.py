"""`intarsia memory`: every buffer of a layer's forward and backward, and what other implementations save."""

import argparse
import json

MIB = 1 << 20


def add_parser(commands) -> None:
    from ..presets import PRESETS

    p = commands.add_parser(
        "memory",
        help="every buffer of a layer with bytes and lifetime, beside other implementations",
        description="Every buffer of a layer's forward and backward with bytes and lifetime, for each save mode, and "
        "what MegaBlocks, ScatterMoE, Megatron, MoEBlaze and SonicMoE save. Takes a preset, or the sizes; sizes that "
        "are given win over the preset's. A shared expert is not counted.",
        epilog=f"presets: {', '.join(PRESETS)}",
    )
    p.add_argument("--preset", metavar="NAME", help="a model's layer, for instance qwen3-30b-a3b")
    p.add_argument("--tokens", type=int, metavar="T", help="tokens in one call (default: the preset's, else 32768)")
    p.add_argument("--hidden", type=int, metavar="H")
    p.add_argument("--width", type=int, metavar="I", help="intermediate width of one expert")
    p.add_argument("--experts", type=int, metavar="E")
    p.add_argument("--experts-per-token", type=int, metavar="K")
    p.add_argument("--activation", metavar="NAME", help="default swiglu")
    p.add_argument(
        "--router", dest="scores", metavar="FAMILY", help="softmax_renorm (default), softmax, sigmoid_group, sigmoid"
    )
    p.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    p.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="whose workspaces (default: auto, where layers run on this machine); needs no such device",
    )
    p.add_argument("--json", action="store_true", help="machine-readable")
    p.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..memory import backend_here, report

    backend = backend_here() if arguments.device == "auto" else arguments.device
    result = report(_size(arguments), backend)
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        print(table(result))
    return 0


def _size(arguments: argparse.Namespace):
    from dataclasses import replace

    from ..memory import LayerSize
    from ..presets import get_preset

    names = ("tokens", "hidden", "width", "experts", "experts_per_token", "activation", "scores")
    given = {n: getattr(arguments, n) for n in names if getattr(arguments, n) is not None}
    if arguments.preset:
        preset = get_preset(arguments.preset)
        size = LayerSize.of(preset, given.pop("tokens", None) or preset.tokens or 32768, arguments.dtype)
        return replace(size, **given)
    sizes = ("hidden", "width", "experts", "experts_per_token")
    missing = ["--" + n.replace("_", "-") for n in sizes if n not in given]
    if missing:
        raise ValueError(f"memory: expected --preset NAME or all sizes; missing {', '.join(missing)}")
    return LayerSize(**{"tokens": 32768, **given}, dtype=arguments.dtype)


def table(result: dict) -> str:
    """The report for people."""
    size = result["size"]
    letters = {"T": "tokens", "H": "hidden", "I": "width", "E": "experts", "K": "experts_per_token", "R": "rows"}
    shown = [f"{letter} {size[name]}" for letter, name in letters.items()]
    lines = ["  ".join([*shown, size["dtype"], size["activation"], size["scores"], result["backend"]])]
    for mode, plan in result["modes"].items():
        saved, peak = _mib(plan["saved_bytes"]), _mib(plan["peak_bytes"])
        lines += ["", f'save="{mode}": saved {saved} MiB with x, peak {peak} MiB above x and weights']
        lines += [f"  {'buffer':<22}{'shape':<20}{'dtype':<10}{'MiB':>10}  lifetime"]
        for b in plan["buffers"]:
            shape = "(" + ", ".join(map(str, b["shape"])) + ")"
            life = " .. ".join(dict.fromkeys(b["lifetime"]))
            lines += [f"  {b['name']:<22}{shape:<20}{b['dtype']:<10}{_mib(b['bytes']):>10}  {life}"]
    lines += ["", "saved by others for the same layer (x included)", f"  {'':<22}{'MiB':>10}  from"]
    for name, peer in result["peers"].items():
        shown = _mib(peer["saved_bytes"]) if peer["saved_bytes"] is not None else "-"
        lines += [f"  {name:<22}{shown:>10}  {'; '.join(filter(None, (peer['formula'], peer['source'])))}"]
    return "\n".join(lines)


def _mib(count: int) -> str:
    return f"{count / MIB:.2f}"
