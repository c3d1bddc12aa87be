"""Everything that touches Megatron: `install()` once, `attach()` an objective to each model config."""

from bebop_megatron.mcore.attachment import attach, attached
from bebop_megatron.mcore.install import install, uninstall

__all__ = ["attach", "attached", "install", "uninstall"]
