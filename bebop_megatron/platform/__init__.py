"""Where Megatron runs: on GPUs as it is, on CPU and gloo through a shim that is entered on purpose."""

from bebop_megatron.platform.cpu import active, enter, leave, maybe_enter_cpu

__all__ = ["active", "enter", "leave", "maybe_enter_cpu"]
