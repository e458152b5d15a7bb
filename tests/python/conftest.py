"""Settings of the Python tests. HYPOTHESIS_PROFILE=long draws more; the default keeps the whole suite within
minutes.
"""

import os

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("short", max_examples=30, deadline=None, print_blob=True)
hypothesis.settings.register_profile("smoke", max_examples=4, deadline=None, print_blob=True)
hypothesis.settings.register_profile("long", max_examples=1000, deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))

# On tensors this small a second thread only waits; tests of threads, and test_moe_mlp, ask for more.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh_randomness():
    """Every run draws other numbers; the seed is in the report of a failure (pytest shows fixtures' output)."""
    seed = torch.seed()
    print(f"torch.manual_seed({seed})")
