"""What a training run is: everything that decides its numbers, stored whole in the checkpoint."""

from dataclasses import dataclass

ROUTERS = ("softmax_renorm", "softmax", "sigmoid_group", "sigmoid", "rounded")
ROUNDINGS = ("nearest", "up", "down", "stochastic", "balanced")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Sizes, routing and optimisation of `intarsia train`. Two CPU cores train the defaults in about two minutes."""

    text: str | None = None
    steps: int = 600
    batch: int = 8
    context: int = 256
    layers: int = 3
    hidden: int = 192
    heads: int = 6
    width: int = 192
    experts: int = 16
    experts_per_token: int = 2
    router: str = "softmax_renorm"  # a router family, or "rounded": token rounding in training, top-k in evaluation
    rounding: str = "nearest"
    tile: int = 128
    save: str = "preactivation"
    dtype: str = "float32"
    device: str = "cpu"
    lr: float = 3e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "batch",
            "context",
            "layers",
            "hidden",
            "heads",
            "width",
            "experts",
            "experts_per_token",
            "tile",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden: expected a multiple of 2 * heads = {2 * self.heads}, got {self.hidden}")
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token: expected at most experts = {self.experts}, got {self.experts_per_token}"
            )
