"""The `lockgate` command; starts services as processes and never imports them."""
