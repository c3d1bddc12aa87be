"""Which keys later draft steps attend to: carried by the model config, refused before training where it cannot work."""

from __future__ import annotations

from typing import Any

from bebop_megatron.config import MTP_ATTENTION, AttentionConfig

PER_DEPTH = MTP_ATTENTION[0]
_ATTRIBUTE = "bebop_mtp_attention"


def set_mtp_attention(config: Any, mode: str | None) -> None:
    """Have a TransformerConfig's MTP block made of our layers, attending as `mode` says (None: not said).

    Raises:
        ValueError: an unknown mode, or one that does not work with this config.
    """
    if AttentionConfig(mode).mode not in (None, PER_DEPTH):
        require_supported(config, str(mode))
    setattr(config, _ATTRIBUTE, mode)


def wants_our_layers(config: Any) -> bool:
    """Whether `set_mtp_attention` has been called on this config."""
    return hasattr(config, _ATTRIBUTE)


def mtp_attention(config: Any, default: str = PER_DEPTH) -> str:
    """The mode that the config carries, or `default` where none was said."""
    return getattr(config, _ATTRIBUTE, None) or default


def _obstacles(config: Any) -> list[str]:
    """Why `chain` and `first-depth` cannot work with this config, each in a sentence that says what to change."""
    get = lambda name, default=None: getattr(config, name, default)  # noqa: E731
    selective = get("recompute_modules") or [] if get("recompute_granularity") == "selective" else []
    latent = get("multi_latent_attention", False)
    found = []
    if not get("mtp_num_layers"):
        found.append("the model has no MTP layers: add --mtp-num-layers")
    elif config.mtp_num_layers > 1 and not get("mtp_use_repeated_layer"):
        found.append(
            f"the model has {config.mtp_num_layers} distinct MTP layers, and keys of step 1 belong to the first: "
            "add --mtp-use-repeated-layer"
        )
    if config.attention_dropout > 0:
        found.append(f"attention dropout is {config.attention_dropout}: add --attention-dropout 0")
    if get("window_size") is not None:
        found.append(f"sliding-window attention (window_size={get('window_size')}) is not supported")
    if get("softmax_type", "vanilla") != "vanilla":
        found.append(f"softmax_type is {get('softmax_type')!r}: only 'vanilla' is supported")
    if get("qk_clip", False) or get("log_max_attention_logit", False):
        found.append("QK clipping and its logging do not see later draft steps: turn them off")
    if get("mrope_section") is not None:
        found.append("multimodal rotary positions (mrope) are not supported: use --position-embedding-type rope")
    if latent and get("apply_rope_fusion", False):
        found.append("latent attention fuses its rotary kernel with positions of its own: add --no-rope-fusion")
    if "mla_up_proj" in selective:
        found.append("recomputing mla_up_proj frees keys that later steps need: leave it out of --recompute-modules")
    if get("experimental_attention_variant") == "dsa":
        found.append("DeepSeek sparse attention is not supported")
    if get("cuda_graph_impl", "none") not in (None, "none"):
        found.append(f"CUDA graphs (cuda_graph_impl={get('cuda_graph_impl')!r}) capture no state between depths")
    if get("fine_grained_activation_offloading", False):
        found.append("fine-grained activation offloading frees keys that later steps need: turn it off")
    if get("overlap_moe_expert_parallel_comm", False):
        found.append("overlapped expert-parallel communication runs MTP layers in pieces of its own: turn it off")
    if get("hybrid_context_parallel", False):
        found.append("context-parallel groups that change per sequence are not supported")
    if (get("fp8") or get("fp4")) and get("recompute_granularity") == "full":
        found.append("full recompute with fp8 or fp4 is not supported: use selective recompute")
    return found


def require_supported(config: Any, mode: str) -> None:
    """Refuse what `chain` and `first-depth` cannot do.

    Raises:
        ValueError: with every reason, and what to change.
    """
    found = _obstacles(config)
    if found:
        raise ValueError(f"--mtp-attention {mode} does not work here: {'; '.join(found)}")


def require_attention_only(pattern: str | None, config: Any) -> None:
    """Refuse a HybridModel whose MTP layers remember in another way than by keys and values.

    Raises:
        ValueError: the MTP part of the pattern has recurrent layers, and the config's mode needs keys.
    """
    from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols, parse_hybrid_pattern

    if pattern is None or mtp_attention(config) == PER_DEPTH:
        return
    mtp = parse_hybrid_pattern(pattern).mtp_pattern or ""
    recurrent = sorted({symbol for symbol in mtp if symbol in (Symbols.MAMBA, Symbols.GDN, Symbols.DS_ATTENTION)})
    if recurrent:
        raise ValueError(
            f"--mtp-attention {mtp_attention(config)} needs MTP layers that remember by keys and values, and the MTP "
            f"pattern {mtp!r} has {', '.join(recurrent)}: use attention (*) there, or --mtp-attention per-depth"
        )
