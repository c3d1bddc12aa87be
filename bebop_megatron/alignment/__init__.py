"""Who is the target of whom. The only shift by depth in the package.

Depth i (1..k) of anchor t predicts the token after position t+i, so its target distribution is the backbone's at row
t+i and its label is labels[t+i]. `mask[i]` says whether `labels[i]` may be a target. Every layout of a batch becomes
the same two tables (`tables.py`); layouts differ in which positions a rank holds (`shard.py`) and in what it has to
ask its neighbours for (`reach.py`).
"""

from bebop_megatron.alignment.reach import Reach
from bebop_megatron.alignment.shard import LAYOUTS, ContextShard
from bebop_megatron.alignment.tables import Alignment, align, document_ends, valid_entries

__all__ = ["LAYOUTS", "Alignment", "ContextShard", "Reach", "align", "document_ends", "valid_entries"]
