"""torch.compile in place, block by block: whether it can be, how, and what it did."""
