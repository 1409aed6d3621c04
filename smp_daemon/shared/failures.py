"""How often nodes fail, as long as nothing else is known."""

NODE_MTBF_S = 1000 / 2.3 * 86400.0
"""Assumed time between failures of one node: 2.3 per 1,000 node-days on 32,768 GPUs (FT-HSDP, arXiv 2602.00277)."""

NODE_LOST = 0.13
"""Share of failures that take the memory of a node with them, in the same study."""

SEVERAL_LOST = 0.01
"""Share of failures that hit several nodes at once, such as a rack: 1 to 2 % where studies report it."""
