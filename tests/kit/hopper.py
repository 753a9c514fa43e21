"""Whether this machine's GPU runs the Hopper kernels; on another one their tests hold that they refuse, or that "auto" does without them."""

import torch


def is_hopper() -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)


def best_backend() -> str:
    """The Hopper backend where it runs, else the portable one: asked for by name, so that no test passes on the other unseen."""
    return "gluon_sm90" if is_hopper() else "triton"
