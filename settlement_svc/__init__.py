"""The workers' side: the loops that carry, answer and settle admitted work, and the peer routes."""
