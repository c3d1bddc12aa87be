"""Hugging Face folders to Megatron checkpoints and back: `python -m bebop_megatron.convert --help`."""

from bebop_megatron.convert.attaching import attach_head
from bebop_megatron.convert.exporting import export_checkpoint
from bebop_megatron.convert.importing import import_checkpoint
from bebop_megatron.convert.inspection import inspect_path

__all__ = ["attach_head", "export_checkpoint", "import_checkpoint", "inspect_path"]
