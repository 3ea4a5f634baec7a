"""Faults against real processes, judged by a ledger of effects that none of them can touch."""
