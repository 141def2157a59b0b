"""torch.compile in place, block by block: requirements, application, and statistics."""
