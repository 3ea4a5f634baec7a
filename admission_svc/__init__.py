"""The tenants' door: HTTP only; every change goes through shared.store."""
