"""Callers that mean harm: what they send is refused, held within bounds, and never told on."""
