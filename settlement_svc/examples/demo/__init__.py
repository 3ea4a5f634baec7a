"""The demonstration: the whole promise on a real, durable store, with separate processes and real kills."""
