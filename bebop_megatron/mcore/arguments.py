"""Command-line flags, generated from the fields of the config dataclasses."""

from __future__ import annotations

import argparse
import dataclasses
import traceback
from typing import Any

from bebop_megatron.config import AttentionConfig, FreezeConfig, MetricsConfig, ObjectiveConfig
from bebop_megatron.losses import OBJECTIVES

_CONFIGS = (ObjectiveConfig, AttentionConfig, FreezeConfig, MetricsConfig)


def _destination(config: type, field: dataclasses.Field[Any]) -> str:
    return field.metadata["flag"].lstrip("-").replace("-", "_")


def refusal(error: Exception) -> str:
    """What Megatron's checks of its flags say; of an assertion without words, the condition that does not hold."""
    if str(error):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    condition = (place.line or "").removeprefix("assert ")
    return (
        f"Megatron's check of the flags fails: {condition} ({place.filename}, line {place.lineno}; "
        "args.some_name is the flag --some-name)"
    )


def _repair_help(parser: argparse.ArgumentParser) -> None:
    """Let `--help` print: Megatron 0.19.2 has a help text with a bare percent sign, on which argparse gives up."""
    for action in parser._actions:
        try:
            _ = (action.help or "") % {**vars(action), "prog": parser.prog}
        except ValueError:
            action.help = (action.help or "").replace("%", "%%")


def add_mtp_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to a Megatron parser: the `extra_args_provider` of `parse_and_validate_args`."""
    group = parser.add_argument_group(title="bebop-megatron: multi-token prediction for speculative decoding")
    for config in _CONFIGS:
        for field in dataclasses.fields(config):
            options = {k: v for k, v in field.metadata.items() if k not in ("flag", "help")}
            text = field.metadata["help"].replace("{losses}", ", ".join(OBJECTIVES))
            group.add_argument(
                field.metadata["flag"],
                default=field.default,
                dest=_destination(config, field),
                help=text.replace("%", "%%"),
                **options,
            )
    _repair_help(parser)
    return parser


def config_from_args(config: type, args: argparse.Namespace) -> Any:
    """Build one of our config dataclasses from parsed arguments.

    Raises:
        ValueError: whatever the dataclass refuses.
    """
    return config(**{f.name: getattr(args, _destination(config, f), f.default) for f in dataclasses.fields(config)})
