"""Whole tensors from several inventories: what tensor ranks, stages and experts hold, joined."""
