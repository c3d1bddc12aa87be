"""Everything that touches Megatron: `install()` once, `attach()` an objective to each model config."""

from bebop_megatron.mcore.attachment import attach, attached, set_iteration
from bebop_megatron.mcore.install import install, uninstall
from bebop_megatron.mcore.validation import measuring

__all__ = ["attach", "attached", "install", "measuring", "set_iteration", "uninstall"]
